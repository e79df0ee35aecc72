// jachess::sample_directions on the CPU: eight blocks of random words at a time, one per SIMD lane.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "../direction_arguments.h"
#include "../text.h"
#include "tensors.h"

namespace jachess {
namespace {

// Whole groups of dimensions of one direction of one token.
template <Distribution distribution>
JACHESS_CLONES void fill_row(PhiloxKey key, uint64_t offset, uint32_t direction, uint32_t token,
                             int64_t groups, float* row) {
  for (int64_t g = 0; g < groups; ++g) {
    float* group = row + g * kDirectionGroup;
#pragma omp simd
    for (int l = 0; l < kDirectionLanes; ++l) {
      const uint32_t block = static_cast<uint32_t>(g * kDirectionLanes + l);
      const DirectionValues values =
          direction_values<distribution>(direction_words(key, offset, direction, token, block));
      group[l] = values.of_word[0];
      group[kDirectionLanes + l] = values.of_word[1];
      group[2 * kDirectionLanes + l] = values.of_word[2];
      group[3 * kDirectionLanes + l] = values.of_word[3];
    }
  }
}

struct Draw {
  PhiloxKey key;
  uint64_t offset;
  const int64_t* token;
  int64_t tokens, d;
};

// Rows [begin, end) of the result, direction by direction and token by token.
template <Distribution distribution, typename T>
void fill_rows(const Draw& draw, T* out, int64_t begin, int64_t end) {
  const int64_t groups = (draw.d + kDirectionGroup - 1) / kDirectionGroup;
  std::vector<float> scratch(static_cast<size_t>(groups * kDirectionGroup));
  for (int64_t r = begin; r < end; ++r) {
    const int64_t token = draw.token[r % draw.tokens];
    if (token < 0) {
      std::fill_n(out + r * draw.d, draw.d, T{});
      continue;
    }
    fill_row<distribution>(draw.key, draw.offset, static_cast<uint32_t>(r / draw.tokens),
                           static_cast<uint32_t>(token), groups, scratch.data());
    convert_array(scratch.data(), out + r * draw.d, draw.d);
  }
}

Tensor sample_directions(const Tensor& token, int64_t q, int64_t d, const Tensor& seed,
                         const Tensor& offset, const Text& distribution, ScalarType dtype) {
  const Distribution kind = parse_distribution(distribution);
  Tensor out = new_directions(token, q, d, dtype);
  const char* op = "sample_directions";
  const int64_t key = *number_on_device(op, "seed", seed, token);
  const int64_t counter = *number_on_device(op, "offset", offset, token);
  check_offset(counter);
  if (out.numel() == 0) return out;
  const Tensor dense = torch::stable::contiguous(token);
  const Draw draw = {philox_key(static_cast<uint64_t>(key)), static_cast<uint64_t>(counter),
                     input<int64_t>(dense), token.numel(), d};
  const int64_t grain = std::max<int64_t>(1, 8192 / d);
  dispatch_dtype(dtype, [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    T* to = data<T>(out);
    torch::stable::parallel_for(0, q * draw.tokens, grain, [&](int64_t begin, int64_t end) {
      if (kind == Distribution::gaussian) {
        fill_rows<Distribution::gaussian>(draw, to, begin, end);
      } else {
        fill_rows<Distribution::rademacher>(draw, to, begin, end);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) {
  m.impl("sample_directions", TORCH_BOX(&jachess::sample_directions));
}
