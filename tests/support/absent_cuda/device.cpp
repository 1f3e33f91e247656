// A CUDA device that is not there, for a torch that was built without CUDA.
//
// It stands in for libcuda and libtorch_cuda, with which Inductor links its libraries: tensors of the device are tensors
// on the CPU, its operators are those of the CPU, and a launch of a kernel calls a function that whoever loaded this
// library has given.

#include "guard.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

namespace {

// Runs a kernel: the file with its binary, its name, the grid, the addresses of its arguments. Zero if it succeeded.
using Launch = int (*)(const char*, const char*, unsigned, unsigned, unsigned, void**);

Launch launch = nullptr;

struct Function {
  std::string path;
  std::string name;
};

CUresult missing(const char* name) {
  std::cerr << "Error: the absent device has no " << name << '\n';
  return CUDA_ERROR_NOT_SUPPORTED;
}

} // namespace

extern "C" {

void absent_cuda_launches(Launch given) {
  launch = given;
}

// ------------------------------------------------------------------------------------------------ libcuda

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the absent device";
  return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule* module, const char* path) {
  *module = reinterpret_cast<CUmodule>(new std::string(path));
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule*, const void*) {
  return missing("cuModuleLoadData");
}

CUresult cuModuleUnload(CUmodule module) {
  delete reinterpret_cast<std::string*>(module);
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  const auto& path = *reinterpret_cast<std::string*>(module);
  *function = reinterpret_cast<CUfunction>(new Function{path, name});
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(
    CUfunction function,
    unsigned x,
    unsigned y,
    unsigned z,
    unsigned,
    unsigned,
    unsigned,
    unsigned,
    CUstream,
    void** arguments,
    void**) {
  const auto& called = *reinterpret_cast<Function*>(function);
  if (launch == nullptr) {
    return missing("kernels");
  }
  const int code = launch(called.path.c_str(), called.name.c_str(), x, y, z, arguments);
  return code == 0 ? CUDA_SUCCESS : CUDA_ERROR_LAUNCH_FAILED;
}

// ------------------------------------------------------------------------------------------------ libtorch_cuda

int32_t aoti_torch_device_type_cuda() {
  return aoti_torch_device_type_cpu();
}

AOTITorchError aoti_torch_create_cuda_guard(int32_t, CUDAGuardHandle*) {
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_cuda_guard(CUDAGuardHandle) {
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_create_cuda_stream_guard(void*, int32_t, CUDAStreamGuardHandle*) {
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_cuda_stream_guard(CUDAStreamGuardHandle) {
  return AOTI_TORCH_SUCCESS;
}

// ------------------------------------------------------------------------------------------------ libcudart

// Models in AOTInductor's container have events and memory of their own.

const char* cudaGetErrorString(cudaError_t) {
  return "an error of the absent device";
}

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = nullptr;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t) {
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t) {
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaSuccess;
}

// For each operator of torch's C interface on CUDA, a call of the same one on the CPU.
#include "operators.inc"

} // extern "C"
