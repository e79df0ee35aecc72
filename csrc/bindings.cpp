// The pybind11 module `_C`: what this build is. It links no torch, so that it loads, and can say
// what is wrong, even where the operators' library (`_ops`) does not.
#include <pybind11/pybind11.h>

#include "jet_math.h"

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

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build information of jachess_ext.";
  m.def("build_info", &build_info,
        "What was built: torch, compiler, cpu, cuda (toolkit version, '' for none), cuda_archs.");
  m.def("activation_kinds", &activation_kinds, "Kinds that the compiled activation_jet knows.");
  m.attr("max_directions") = jachess::kMaxDirections;
}
