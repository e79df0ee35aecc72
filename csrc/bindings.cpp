// The pybind11 module `_C`: what this build is. It links no torch, so that it loads, and can say
// what is wrong, even where the operators' library (`_ops`) does not.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "attention/tile_sizes.h"
#include "jet_math.h"
#include "philox.h"

#ifndef JACHESS_TORCH_VERSION
#define JACHESS_TORCH_VERSION "unknown"
#endif
#ifndef JACHESS_CUDA_VERSION
#define JACHESS_CUDA_VERSION ""
#endif
#ifndef JACHESS_CUDA_ARCHS
#define JACHESS_CUDA_ARCHS ""
#endif

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["torch"] = JACHESS_TORCH_VERSION;
#if defined(__clang__)
  info["compiler"] = __VERSION__;
#else
  info["compiler"] = "GCC " __VERSION__;
#endif
#if defined(__x86_64__)
  info["cpu"] = "x86-64";
#elif defined(__aarch64__)
  info["cpu"] = "aarch64";
#else
  info["cpu"] = "other";
#endif
  info["cuda"] = JACHESS_CUDA_VERSION;
  info["cuda_archs"] = JACHESS_CUDA_ARCHS;
  return info;
}

py::tuple activation_kinds() {
  py::list names;
#define JACHESS_NAME(name) names.append(#name);
  JACHESS_FOR_EACH_ACTIVATION(JACHESS_NAME)
#undef JACHESS_NAME
  return py::tuple(names);
}

std::array<uint32_t, 4> philox4x32_10(const std::array<uint32_t, 4>& counter,
                                      const std::array<uint32_t, 2>& key) {
  const jachess::PhiloxWords words =
      jachess::philox4x32_10({counter[0], counter[1], counter[2], counter[3]}, {key[0], key[1]});
  return {words.x, words.y, words.z, words.w};
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information of jachess_ext, and its random number generator.";
  m.def("build_info", &build_info,
        "What was built: torch, compiler, cpu, cuda (toolkit version, '' for none), cuda_archs.");
  m.def("activation_kinds", &activation_kinds, "Kinds that the compiled activation_jet knows.");
  m.def("philox4x32_10", &philox4x32_10, py::arg("counter"), py::arg("key"),
        "Four random words of a counter of four and a key of two 32-bit words (csrc/philox.h).");
  m.def("attention_jet_bytes", &jachess::attention_least_bytes, py::arg("element"),
        py::arg("streams"), py::arg("size"), py::arg("value_size"),
        "The shared memory, in bytes, that attention_jet's CUDA kernels need at least for heads of "
        "these sizes, elements of so many bytes and up to four streams.");
  m.attr("max_directions") = jachess::kMaxDirections;
}
