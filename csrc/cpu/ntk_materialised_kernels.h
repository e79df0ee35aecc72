// The kernels of jachess::ntk_materialised as the torch side sees them: one set per instruction
// set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../attention_problem.h"  // attention_pack.h needs its strides
#include "aligned_buffer.h"
#include "ntk_materialised_plan.h"
#include "simd.h"

namespace jachess {

struct MaterialisedKernels {
  MaterialisedTile wide, narrow;  // of float64, and of float32
  // Packs items [begin, end) of the work's packing.
  void (*pack)(const MaterialisedWork&, int64_t begin, int64_t end);
  // Writes and multiplies the pieces of shares [begin, end).
  void (*multiply)(const MaterialisedWork&, int64_t begin, int64_t end);
};

const MaterialisedKernels& ntk_materialised_baseline();
const MaterialisedKernels& ntk_materialised_v3();
const MaterialisedKernels& ntk_materialised_v4();

}  // namespace jachess
