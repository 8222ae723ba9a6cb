"""DRVI: a variational autoencoder of gene counts on scvi-tools, with additive decoders."""

import json

import anndata
import numpy as np
import scvi
from drvi.model import DRVI

scvi.settings.seed = 0
cells = anndata.AnnData(np.random.default_rng(0).poisson(2, size=(120, 20)).astype("float32"))
DRVI.setup_anndata(cells, is_count_data=True)
model = DRVI(cells, n_latent=4, encoder_dims=[16], decoder_dims=[16])
model.train(max_epochs=2, accelerator="cpu", batch_size=40, early_stopping=False)
shape = model.get_latent_representation().shape
print(json.dumps({"exact": {"shape": list(shape)}}))
