"""The engine: continuous batching over paged caches, in token ids only. It knows neither text nor HTTP."""
