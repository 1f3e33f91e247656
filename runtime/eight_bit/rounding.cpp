// Codes and scales of blocks to FP32 and back, on a CPU: eight_bit_states.py in one pass over the elements.
//
// Every operation on numbers is a product, a quotient or a comparison, which IEEE 754 defines to the bit, so the results
// are those of torch's operators whatever compiles this and with whatever instructions.

#include <cstdint>
#include <cstring>

namespace {

constexpr std::int64_t block_numel = 256;
// Blocks that a thread takes at least: about 20 microseconds of work.
constexpr std::int64_t least_blocks = 64;

constexpr std::uint32_t infinity = 0x7f800000;
constexpr std::uint32_t nan = 0x7fc00000;

struct Widening {
  const std::uint8_t* codes;
  const float* absmax;
  const float* values;
  float* out;
};

void widen(std::int64_t first, std::int64_t stop, void* context) {
  const Widening job = *static_cast<const Widening*>(context);
  for (std::int64_t block = first; block < stop; ++block) {
    const std::uint8_t* codes = job.codes + block * block_numel;
    float* out = job.out + block * block_numel;
    const float scale = job.absmax[block];
    for (int i = 0; i < block_numel; ++i) {
      out[i] = job.values[codes[i]] * scale;
    }
  }
}

struct Narrowing {
  const float* values;
  const std::uint32_t* steps;
  std::uint8_t* codes;
  float* absmax;
};

float largest(const float* values) {
  // Without their sign, numbers are in the order of their bits, and NaNs are above infinity.
  std::uint32_t most = 0;
  for (int i = 0; i < block_numel; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, values + i, sizeof bits);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  most = most > infinity ? nan : most;
  float value;
  std::memcpy(&value, &most, sizeof value);
  return value;
}

// Four loops over a block instead of one, because compilers then use vectors for all but the look-up.
void narrow(std::int64_t first, std::int64_t stop, void* context) {
  const Narrowing job = *static_cast<const Narrowing*>(context);
  alignas(64) std::uint32_t quotients[block_numel];
  alignas(64) std::uint32_t steps[block_numel];
  for (std::int64_t block = first; block < stop; ++block) {
    const float* values = job.values + block * block_numel;
    std::uint8_t* codes = job.codes + block * block_numel;
    const float scale = largest(values);
    job.absmax[block] = scale;
    const float divisor = scale == 0 ? 1.0f : scale;
    for (int i = 0; i < block_numel; ++i) {
      const float quotient = values[i] / divisor;
      std::memcpy(quotients + i, &quotient, sizeof quotient);
    }
    for (int i = 0; i < block_numel; ++i) {
      steps[i] = job.steps[quotients[i] >> 16];
    }
    for (int i = 0; i < block_numel; ++i) {
      // The lower halves of negative numbers are counted from the other end, so that codes ascend with them.
      const std::uint32_t sign = 0u - (quotients[i] >> 31);
      codes[i] = static_cast<std::uint8_t>((steps[i] + ((quotients[i] ^ sign) & 0xffff)) >> 16);
    }
  }
}

} // namespace

extern "C" {

using Range = void (*)(std::int64_t first, std::int64_t stop, void* context);
// torch_parallel_for of torch's stable interface: it divides a range among the calling thread's threads.
using ParallelFor = std::int32_t (*)(std::int64_t, std::int64_t, std::int64_t, Range, void*);

std::int32_t zeroir_widen(
    ParallelFor parallel_for,
    std::int64_t blocks,
    const std::uint8_t* codes,
    const float* absmax,
    const float* values,
    float* out) {
  Widening job{codes, absmax, values, out};
  return parallel_for(0, blocks, least_blocks, widen, &job);
}

// `steps` has an element for each upper half of a quotient's bits: its code, in the upper 16 bits, and what the lower
// half may lack to the code after it. Where `is_skipped` is not null and holds, nothing is written.
std::int32_t zeroir_narrow(
    ParallelFor parallel_for,
    std::int64_t blocks,
    const float* values,
    const std::uint32_t* steps,
    std::uint8_t* codes,
    float* absmax,
    const bool* is_skipped) {
  if (is_skipped != nullptr && *is_skipped) {
    return 0;
  }
  Narrowing job{values, steps, codes, absmax};
  return parallel_for(0, blocks, least_blocks, narrow, &job);
}

}
