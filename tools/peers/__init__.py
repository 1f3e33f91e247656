"""What zeroir is measured against: the same model, data and optimizer under torch's and DeepSpeed's own ZeRO."""
