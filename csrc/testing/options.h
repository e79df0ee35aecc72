// Input, output and options of the programs that run launchers of csrc/cuda under the CPU shim:
//
//   PROGRAM INPUT OUTPUT NAME=VALUE...
//
// INPUT holds the tensors' elements one after the other. Every buffer is an allocation of its exact
// size, so that the address sanitizer sees its ends. `backwards` and `shared_limit` are the shim's.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "../dtypes.h"
#include "cuda_shim.h"

namespace jachess::shim {

using Buffer = std::vector<char>;

inline std::ifstream input;
inline std::ofstream output;
inline std::map<std::string, std::string> options;

inline double number(const std::string& name) { return std::atof(options.at(name).c_str()); }
inline int integer(const std::string& name) { return std::atoi(options.at(name).c_str()); }

// Of "1,2,3".
inline std::vector<int64_t> integers(const std::string& name) {
  std::vector<int64_t> values;
  std::istringstream text(options.at(name));
  for (std::string part; std::getline(text, part, ',');) values.push_back(std::atoll(part.c_str()));
  return values;
}

inline Buffer read(int64_t bytes) {
  Buffer buffer(static_cast<size_t>(bytes));
  if (!input.read(buffer.data(), bytes)) {
    std::fprintf(stderr, "the input ends too early\n");
    std::exit(2);
  }
  return buffer;
}

inline void write(const Buffer& buffer) {
  output.write(buffer.data(), static_cast<std::streamsize>(buffer.size()));
}

inline int64_t element_bytes(Storage storage) {
  return storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : 2;
}

// The program's exit status for what a launcher returned.
inline int exit_status(int error) {
  if (error != 0) std::fprintf(stderr, "the launcher returned %d\n", error);
  return error == 0 ? 0 : 3;
}

inline void parse_options(int count, char** argument) {
  if (count < 3) {
    std::fprintf(stderr, "expected INPUT OUTPUT NAME=VALUE...\n");
    std::exit(2);
  }
  input.open(argument[1], std::ios::binary);
  output.open(argument[2], std::ios::binary);
  for (int i = 3; i < count; ++i) {
    const std::string option = argument[i];
    const size_t middle = option.find('=');
    options[option.substr(0, middle)] = option.substr(middle + 1);
  }
  backwards = integer("backwards") != 0;
  shared_limit = static_cast<size_t>(integer("shared_limit"));
}

}  // namespace jachess::shim
