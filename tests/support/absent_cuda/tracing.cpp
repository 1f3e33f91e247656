// Lets torch that was built without CUDA trace fake tensors of a device, where this is loaded before torch.
//
// The device has cuDNN, because torch asks which memory formats it writes.

#include "guard.h"

#include <ATen/detail/CUDAHooksInterface.h>

// Torch finds it by its name.
struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCuDNN() const override {
    return true;
  }
  bool compiledWithCuDNN() const override {
    return true;
  }
  long versionCuDNN() const override {
    return 91000;
  }
  long versionRuntimeCuDNN() const override {
    return 91000;
  }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override {
    return true;
  }
  bool supportsDilatedConvolutionWithCuDNN() const override {
    return true;
  }
  bool supportsDepthwiseConvolutionWithCuDNN() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return false;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  int getNumGPUs() const override {
    return 1;
  }
  c10::DeviceIndex current_device() const override {
    return 0;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
