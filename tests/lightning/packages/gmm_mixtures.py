"""torchgmm: a Gaussian mixture and k-means, estimators with fit and predict over trainers of their own."""

import json

import pytorch_lightning as pl
import torch
from torchgmm.bayes import GaussianMixture
from torchgmm.clustering import KMeans

pl.seed_everything(0)
generator = torch.Generator().manual_seed(1)
points = torch.cat([torch.randn(100, 4, generator=generator), torch.randn(100, 4, generator=generator) + 5])
options = {"accelerator": "cpu", "max_epochs": 5, "enable_progress_bar": False}
mixture = GaussianMixture(num_components=2, covariance_type="diag", batch_size=50, trainer_params=options)
mixture.fit(points)
means = KMeans(num_clusters=2, trainer_params=options).fit(points)
results = {"means": sorted(mixture.model_.means.mean(1).tolist()), "score": float(mixture.score(points))}
results["centroids"] = sorted(means.model_.centroids.mean(1).tolist())
results["sizes"] = sorted(means.predict(points).bincount().tolist())
print(json.dumps({"exact": results}))
