// A string argument of an operator. torch's own conversion to std::string (ToImpl, seen in 2.13)
// copies it from the heap and forgets to free that: a string leaked with every call.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <string>

namespace jachess {

struct Text {
  std::string value;
  operator const std::string&() const { return value; }
};

}  // namespace jachess

namespace torch::stable::detail {

template <>
struct ToImpl<jachess::Text> {
  static jachess::Text call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    jachess::Text text = {std::string(data, length)};
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

}  // namespace torch::stable::detail
