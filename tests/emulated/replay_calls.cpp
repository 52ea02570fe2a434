// Repeats the calls that record_calls.py recorded with a library of kernels, and compares the results.
//
// The library may be for another processor: under an emulator, Python and vLLM cannot run, but this program can.
//
//   replay_calls LIBRARY FOLDER [ISA]
//
// Exits with 1 if a result differs. ISA is a level of csrc/cpu/isa.h; without it the library chooses.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <dlfcn.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/library.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace {

constexpr int kShown = 4;  // differences shown per operator

// Converts a list to the typed list that the operator requires; loaded lists are untyped.
c10::IValue as_argument(const c10::IValue& value, const std::string& type) {
  if (value.isList() && type.find("Tensor") != std::string::npos) {
    c10::List<at::Tensor> list;
    for (const c10::IValue& one : value.toListRef()) list.push_back(one.toTensor());
    return list;
  }
  if (value.isList() && type.find("int") != std::string::npos) {
    c10::List<int64_t> list;
    for (const c10::IValue& one : value.toListRef()) list.push_back(one.toInt());
    return list;
  }
  if (value.isInt() && type.find("float") != std::string::npos) return static_cast<double>(value.toInt());
  return value;
}

// Returns what is wrong with a call's results, or an empty text.
std::string difference(const std::vector<at::Tensor>& found, c10::ArrayRef<c10::IValue> expected, double rtol,
                       double atol) {
  if (found.size() != expected.size())
    return std::to_string(found.size()) + " results, not " + std::to_string(expected.size());
  for (size_t i = 0; i < found.size(); ++i) {
    const at::Tensor& right = expected[i].toTensor();
    if (found[i].sizes() != right.sizes() || found[i].scalar_type() != right.scalar_type())
      return "result " + std::to_string(i) + " has another shape or type";
    const at::Tensor a = found[i].to(at::kDouble), b = right.to(at::kDouble);
    if (!at::allclose(a, b, rtol, atol, /*equal_nan=*/true))
      return "result " + std::to_string(i) + " differs by " +
             std::to_string(at::nan_to_num(a - b).abs().max().item<double>());
  }
  return "";
}

std::string replay(c10::ArrayRef<c10::IValue> call) {
  const auto op = c10::Dispatcher::singleton().findSchema({"backplane::" + call[0].toStringRef(), ""});
  if (!op) return "there is no such operator";
  const auto& given = call[2].toTupleRef().elements();
  torch::jit::Stack arguments;
  const auto& wanted = op->schema().arguments();
  for (size_t i = 0; i < wanted.size(); ++i)
    arguments.push_back(i < given.size() ? as_argument(given[i], wanted[i].type()->str()) : *wanted[i].default_value());
  torch::jit::Stack stack = arguments;
  try {
    op->callBoxed(&stack);
    std::vector<at::Tensor> found;
    for (const c10::IValue& value : stack) {
      if (value.isTensor()) found.push_back(value.toTensor());
      else if (value.isTensorList())
        for (const at::Tensor& one : value.toTensorVector()) found.push_back(one);
    }
    for (const c10::IValue& place : call[4].toListRef()) {
      const auto i = static_cast<size_t>(place.toInt());
      if (i < given.size() && arguments[i].isTensor()) found.push_back(arguments[i].toTensor());
    }
    return difference(found, call[3].toListRef(), call[5].toDouble(), call[6].toDouble());
  } catch (const std::exception& error) {
    return std::string(error.what()).substr(0, 300);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count < 3) return 2;
  const std::string folder = words[2];
  torch::Library operators(torch::Library::DEF, "backplane", std::nullopt, __FILE__, __LINE__);
  std::ifstream schemas(folder + "/schemas");
  for (std::string line; std::getline(schemas, line);) operators.def(torch::schema(line.c_str()));
  void* library = dlopen(words[1], RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    std::printf("%s\n", dlerror());
    return 2;
  }
  if (count > 3) {
    const int isa = std::atoi(words[3]);
    const auto force = reinterpret_cast<int (*)(int)>(dlsym(library, "backplane_cpu_force_isa"));
    if (force == nullptr || force(isa) != isa) {
      std::printf("this processor has no instruction set %d\n", isa);
      return 2;
    }
  }
  c10::InferenceMode inference(true);
  std::map<std::string, int> calls, wrong;
  int all = 0, all_wrong = 0;
  for (int part = 0;; ++part) {
    std::ifstream file(folder + "/" + std::to_string(part) + ".pt", std::ios::binary);
    if (!file) break;
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    const c10::IValue recorded = torch::jit::pickle_load(bytes);
    for (const c10::IValue& one : recorded.toListRef()) {
      const auto call = one.toTupleRef().elements().vec();
      const std::string& name = call[0].toStringRef();
      const std::string why = replay(call);
      ++calls[name];
      ++all;
      if (why.empty()) continue;
      ++all_wrong;
      if (wrong[name]++ < kShown) std::printf("%s: %s: %s\n", name.c_str(), call[1].toStringRef().c_str(), why.c_str());
    }
    std::printf("part %d: %d calls, %d differ\n", part, all, all_wrong);
    std::fflush(stdout);
  }
  for (const auto& [name, number] : calls) std::printf("%s: %d calls, %d differ\n", name.c_str(), number, wrong[name]);
  return all == 0 || all_wrong > 0;
}
