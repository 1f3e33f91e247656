"""The systems that zeroir is compared with: one model, data and optimizer under the ZeRO of torch and DeepSpeed."""
