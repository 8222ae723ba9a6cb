"""scvi-tools: a variational autoencoder of gene counts, with a Trainer, callbacks and a logger of its own."""

import json

import anndata
import numpy as np
import scvi

scvi.settings.seed = 0
random = np.random.default_rng(0)
cells = anndata.AnnData(random.poisson(2, size=(200, 30)).astype("float32"))
cells.obs["batch"] = np.repeat(["a", "b"], 100)
scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
model = scvi.model.SCVI(cells, n_latent=4, n_hidden=16)
model.train(max_epochs=4, accelerator="cpu", batch_size=50, check_val_every_n_epoch=1, early_stopping=True)
assert len(model.history["elbo_validation"]) == 4
model.save("saved", overwrite=True)
again = scvi.model.SCVI.load("saved", cells)
assert np.array_equal(again.get_latent_representation(), model.get_latent_representation())
print(json.dumps({"elbo": float(model.history["elbo_train"].iloc[-1, 0])}))
