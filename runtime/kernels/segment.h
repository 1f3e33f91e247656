// What a compiled segment has in place of AOTInductor's model, container and interface.
//
// Inductor writes its host code as a method of a class, and a constructor that describes inputs and constants to a
// container of models. Here the class has what the method needs, and the constructor's descriptions go nowhere.
// Compiling the container and its interface takes several times as long as the segment itself, and what they offer,
// such as constants and several runs at once of one model, no segment asks for.
//
// Included after Inductor's headers for the device (aoti_include/cpu.h or cuda.h); ZEROIR_MODEL is the name of the class.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace zeroir {

using torch::aot_inductor::AOTInductorModelKernelsBase;

// Takes the names of inputs.
struct Unread {
  struct {
    const char* name;
  } entry;
  auto& operator[](std::size_t) {
    return entry;
  }
};

class Model {
 public:
  template <typename... Rest>
  explicit Model(std::size_t inputs, Rest&&...) : inputs_(inputs) {}
  std::size_t inputs() const {
    return inputs_;
  }
  // Sets the index of the device, and the folder with the binaries of its kernels.
  void place(std::int32_t device, std::optional<std::string> folder) {
    device_idx_ = device;
    cubin_dir_ = std::move(folder);
  }

 protected:
  template <typename Map>
  void update_constants_map(Map&&) {}
  template <typename Array>
  void update_constants_array(Array&&) {}

  std::size_t inputs_;
  std::int32_t device_idx_ = -1; // as AOTInductor has it for the device "cpu"
  std::optional<std::string> cubin_dir_;
  Unread inputs_info_;
  const char* in_spec_;
  const char* out_spec_;
  std::unique_ptr<AOTInductorModelKernelsBase> kernels_;
};

} // namespace zeroir

namespace torch::aot_inductor {

class ZEROIR_MODEL : public zeroir::Model {
  using AOTInductorModelBase = zeroir::Model;

 public:
  ZEROIR_MODEL(
      std::shared_ptr<ConstantMap>,
      std::shared_ptr<std::vector<ConstantHandle>>,
      const std::string&,
      std::optional<std::string>);
  void run_impl(AtenTensorHandle*, AtenTensorHandle*, DeviceStreamType, AOTIProxyExecutorHandle);

 private:
  std::unordered_map<std::string, AtenTensorHandle> const_run_impl(
      DeviceStreamType,
      AOTIProxyExecutorHandle,
      bool);
  void _const_run_impl(std::vector<AtenTensorHandle>&, DeviceStreamType, AOTIProxyExecutorHandle);
};

// Shapes and strides were settled when the segment was compiled.
inline void __check_inputs_outputs(AtenTensorHandle*, AtenTensorHandle*) {}

} // namespace torch::aot_inductor

#ifdef USE_CUDA
#define ZEROIR_EMBEDDING_GRADIENT aoti_torch_cuda_embedding_gradient
#else
#define ZEROIR_EMBEDDING_GRADIENT aoti_torch_cpu_embedding_gradient
#endif

namespace zeroir {

// Arguments of operators as the dispatcher takes them; it takes tensors over.
inline StableIValue value(AtenTensorHandle tensor) {
  AtenTensorHandle held;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(tensor, &held));
  return reinterpret_cast<StableIValue>(held);
}

inline StableIValue value(double number) {
  StableIValue bits = 0;
  std::memcpy(&bits, &number, sizeof(number));
  return bits;
}

inline StableIValue value(std::int64_t number) {
  return static_cast<StableIValue>(number);
}

inline StableIValue value(std::int32_t boolean) {
  return boolean != 0 ? 1 : 0;
}

template <typename T>
StableIValue optional(T* argument) {
  return argument == nullptr ? 0 : reinterpret_cast<StableIValue>(new StableIValue(value(*argument)));
}

} // namespace zeroir

// zeroir::embedding_gradient, called as torch's C functions for operators are.
inline AOTITorchError ZEROIR_EMBEDDING_GRADIENT(
    AtenTensorHandle out,
    AtenTensorHandle grad,
    AtenTensorHandle indices,
    std::int64_t padding_idx) {
  StableIValue stack[] = {
      zeroir::value(out), zeroir::value(grad), zeroir::value(indices), zeroir::value(padding_idx)};
  return aoti_torch_call_dispatcher("zeroir::embedding_gradient", "", stack);
}

// In this library alone: a process that loads several segments would share one object of an inline function.
static torch::aot_inductor::ZEROIR_MODEL& zeroir_model() {
  static torch::aot_inductor::ZEROIR_MODEL model(nullptr, nullptr, "", std::nullopt);
  return model;
}

// Says on which device the segment runs and where the binaries of its kernels are; called once, on a GPU alone.
extern "C" void zeroir_place(std::int32_t device, const char* folder) {
  zeroir_model().place(device, folder);
}

// Runs the segment on `count` tensors and takes their handles over, on a stream of the device. Zero, or a line on stderr
// and another number. Several threads may call it on the CPU, and one thread on a GPU, whose kernels the first call loads.
extern "C" int zeroir_run(AtenTensorHandle* tensors, std::size_t count, void* stream) {
  auto& model = zeroir_model();
  const bool had_grad = aoti_torch_grad_mode_is_enabled();
  aoti_torch_grad_mode_set_enabled(false);
  int code = 0;
  try {
    if (count != model.inputs()) {
      throw std::invalid_argument(
          std::to_string(model.inputs()) + " tensors were expected, not " + std::to_string(count));
    }
    const auto on = static_cast<torch::aot_inductor::DeviceStreamType>(stream);
    model.run_impl(tensors, nullptr, on, nullptr);
  } catch (const std::exception& error) {
    std::cerr << "Error: " << error.what() << '\n';
    code = 1;
  } catch (...) {
    std::cerr << "Error: unknown\n";
    code = 1;
  }
  aoti_torch_grad_mode_set_enabled(had_grad);
  return code;
}
