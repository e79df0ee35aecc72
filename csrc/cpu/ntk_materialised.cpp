// jachess::ntk_materialised on the CPU: arguments, the plan, and the choice of the kernels.
#include <torch/csrc/stable/library.h>

#include "../ntk_gram_arguments.h"
#include "ntk_materialised_kernels.h"
#include "ntk_positions.h"
#include "tensors.h"

namespace jachess {
namespace {

constexpr double kThreadOperations = 2e6;  // of a thread, at least

const MaterialisedKernels& choose_kernels() {
#if JACHESS_HAS_CLONES
  if (__builtin_cpu_supports("x86-64-v4")) return ntk_materialised_v4();
  if (__builtin_cpu_supports("x86-64-v3")) return ntk_materialised_v3();
#endif
  return ntk_materialised_baseline();
}

// The gradients of one side, in groups and blocks.
struct Gradients {
  Gradients(const GramProblem& p, const GramSide& of, int64_t panel)
      : side(of),
        rows(rows_of(p, of)),
        vectors(gradient_vectors(rows, p.outputs)),
        groups(gradient_groups(vectors, panel)),
        blocks(gradient_blocks(groups)) {}
  Gradients(const Gradients&) = delete;  // each list points into the one before

  const GramSide& side;
  const std::vector<GramRow> rows;
  const std::vector<GradientVector> vectors;
  const std::vector<GradientGroup> groups;
  const std::vector<GradientBlock> blocks;
};

// The kernel of one block of gradients with another, region by region.
class BlockPair {
 public:
  // other: the right side; null where the left block meets itself.
  BlockPair(const GramProblem& p, const MaterialisedKernels& kernels, const GramSide& left,
            GradientBlock block, const GramSide* right, GradientBlock other, int64_t workspace)
      : p_(p),
        kernels_(kernels),
        tile_(p.storage == Storage::f64 ? kernels.wide : kernels.narrow),
        operands_{&left, right == nullptr ? &left : right},
        sides_(right == nullptr ? 1 : 2),
        work_{p.storage,
              {{block, nullptr, nullptr}, {other, nullptr, nullptr}},
              {block.count, other.count, right == nullptr},
              {},
              nullptr,
              0,
              nullptr},
        rows_(tile_count(left.cotangents, p.layers, tile_.rows)),
        columns_(tile_count(&left.inputs, 1, tile_.columns)),
        full_(plan_region(tile_, rows_, columns_, block.count + (sides_ - 1) * other.count,
                          block.positions() + (sides_ - 1) * other.positions(), workspace / 2)) {
    work_.shares = share_count(tile_, work_.pairs.count(), full_.pieces(), workspace / 4);
  }

  template <typename T>
  void run(T* result) {
    const int64_t width = full_.rows * tile_.rows + full_.columns * tile_.columns;
    const int64_t left = numbers(0, width), right = sides_ > 1 ? numbers(1, width) : 0;
    const int64_t size = work_.pairs.count() * tile_.panel * tile_.panel;
    const AlignedBuffer<T> packed(left + right);
    const AlignedBuffer<double> sums(work_.shares * size);
    std::fill(sums + 0, sums + work_.shares * size, 0.0);
    work_.sums = sums;
    for (int side = 0; side < sides_; ++side) {
      T* data = packed + (side == 0 ? 0 : left);
      work_.sides[side].cotangents = data;
      work_.sides[side].inputs = data + numbers(side, full_.rows * tile_.rows);
    }
    for (int64_t row = 0; row < rows_; row += full_.rows)
      for (int64_t column = 0; column < columns_; column += full_.columns) add_region(row, column);
    torch::stable::parallel_for(0, work_.pairs.left, 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        for (int64_t j = work_.pairs.first(i); j < work_.pairs.right; ++j) write(i, j, result);
    });
  }

 private:
  int64_t numbers(int side, int64_t features) const {
    return work_.sides[side].block.positions() * features * tile_.panel;
  }

  void add_region(int64_t row, int64_t column) {
    work_.region = full_;
    work_.region.rows = std::min(full_.rows, rows_ - row);
    work_.region.columns = std::min(full_.columns, columns_ - column);
    const std::vector<MaterialisedPacking> packing = packing_of(row, column);
    work_.packing = packing.data();
    torch::stable::parallel_for(
        0, static_cast<int64_t>(packing.size()), 4,  // few are not worth the threads' start
        [&](int64_t begin, int64_t end) { kernels_.pack(work_, begin, end); });
    torch::stable::parallel_for(0, work_.shares, 1, [&](int64_t begin, int64_t end) {
      kernels_.multiply(work_, begin, end);
    });
  }

  std::vector<MaterialisedPacking> packing_of(int64_t row, int64_t column) const {
    std::vector<MaterialisedPacking> items;
    for (int side = 0; side < sides_; ++side) {
      const GramSide& from = *operands_[side];
      const auto deltas =
          feature_ranges(from.cotangents, p_.layers, tile_.rows, row, row + work_.region.rows);
      const auto inputs =
          feature_ranges(&from.inputs, 1, tile_.columns, column, column + work_.region.columns);
      for (int64_t g = 0; g < work_.sides[side].block.count; ++g) {
        for (const FeatureRange& range : deltas) items.push_back({side, g, false, range});
        for (const FeatureRange& range : inputs) items.push_back({side, g, true, range});
      }
    }
    return items;
  }

  // The shares' sums of groups i and j, added in order.
  template <typename T>
  void write(int64_t i, int64_t j, T* result) const {
    const int64_t square = tile_.panel * tile_.panel, size = work_.pairs.count() * square;
    const double* from = work_.sums + work_.pairs.index(i, j) * square;
    std::vector<double> total(from, from + square);
    for (int64_t share = 1; share < work_.shares; ++share)
      for (int64_t k = 0; k < square; ++k) total[static_cast<size_t>(k)] += from[share * size + k];
    const GradientGroup& rows = work_.sides[0].block.groups[i];
    const GradientGroup& columns = work_.sides[work_.pairs.symmetric ? 0 : 1].block.groups[j];
    for (int64_t r = 0; r < rows.count; ++r)
      for (int64_t c = work_.pairs.symmetric && i == j ? r : 0; c < columns.count; ++c)
        write_entry(rows.vectors[r], columns.vectors[c],
                    static_cast<T>(total[static_cast<size_t>(r * tile_.panel + c)]), result);
  }

  // Of the result [C, N, C, M]; of one side with itself also the mirror image.
  template <typename T>
  void write_entry(const GradientVector& x, const GradientVector& y, T value, T* result) const {
    const int64_t left = p_.left.samples, right = p_.right.samples;
    result[((x.output * left + x.sample) * p_.outputs + y.output) * right + y.sample] = value;
    if (p_.symmetric)
      result[((y.output * left + y.sample) * p_.outputs + x.output) * right + x.sample] = value;
  }

  const GramProblem& p_;
  const MaterialisedKernels& kernels_;
  const MaterialisedTile tile_;
  const GramSide* operands_[2];
  const int sides_;
  MaterialisedWork work_;
  const int64_t rows_, columns_;
  const MaterialisedRegion full_;
};

template <typename T>
void materialise(const GramProblem& p, int64_t workspace, T* result) {
  const MaterialisedKernels& kernels = choose_kernels();
  const int64_t panel = (p.storage == Storage::f64 ? kernels.wide : kernels.narrow).panel;
  const Gradients left(p, p.left, panel);
  const auto run = [&](const GradientBlock& block, const GramSide* right, GradientBlock other) {
    BlockPair(p, kernels, p.left, block, right, other, workspace).run(result);
  };
  if (p.symmetric) {
    for (size_t i = 0; i < left.blocks.size(); ++i)
      for (size_t j = i; j < left.blocks.size(); ++j)
        run(left.blocks[i], i == j ? nullptr : &p.left, left.blocks[j]);
  } else {
    const Gradients right(p, p.right, panel);
    for (const GradientBlock& block : left.blocks)
      for (const GradientBlock& other : right.blocks) run(block, &p.right, other);
  }
}

Tensor ntk_materialised(const Tensor& inputs, const std::vector<Tensor>& cotangents,
                        const std::optional<Tensor>& other_inputs,
                        const std::vector<Tensor>& other_cotangents, int64_t workspace) {
  check(workspace >= 1, "jachess::ntk_materialised: workspace is ", workspace,
        "; expected bytes that it may take, at least 1.");
  const GramInputs prepared =
      prepare_gram("ntk_materialised", inputs, cotangents, other_inputs, other_cotangents);
  if (prepared.empty()) return prepared.result;
  const GramProblem p = prepared.problem();
  if (p.storage == Storage::f64) {
    materialise(p, workspace, data<double>(prepared.result));
  } else {
    materialise(p, workspace, data<float>(prepared.result));
  }
  return prepared.result;
}

}  // namespace
}  // namespace jachess

STABLE_TORCH_LIBRARY_IMPL(jachess, CPU, m) {
  m.impl("ntk_materialised", TORCH_BOX(&jachess::ntk_materialised));
}
