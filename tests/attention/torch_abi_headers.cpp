// torch_abi_headers.cpp - every prototype of csrc/torch/torch_abi.h against torch's headers: drift is a compile error.
// Compiled, never run: g++ -std=c++20 -fsyntax-only -I<torch>/include (tests/attention/test_torch_abi.py).
#include <type_traits>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

extern "C" {
#include "../../csrc/torch/torch_abi.h"
}

#define S1F_SAME(result, name, arguments)                                                                              \
    static_assert(std::is_same_v<decltype(&::name), result(*) arguments>, "drift of " #name);                          \
    static_assert(std::is_same_v<decltype(s1f_torch_functions::name), result(*) arguments>, "table of " #name);
S1F_TORCH_FUNCTIONS(S1F_SAME)
