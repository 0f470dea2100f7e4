"""Models as files that run without this package: torch.export and ONNX."""
