// Defines a captured graph: the operators whose kernels ran during the capture, each with its arguments ready on a
// stack.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "graph_memory.h"

namespace backplane::cpu {

// The properties of an operator that are looked up once per graph.
struct GraphOperator {
  explicit GraphOperator(const c10::OperatorHandle& handle);

  c10::OperatorHandle op;
  std::string name;
  std::optional<c10::SafeKernelFunction> kernel;  // for CPU tensors; absent if there is none
  bool in_python = false;    // its kernel is Python: the operators that it calls are recorded instead
  bool allocates = false;    // and does nothing else
  std::string refused;       // why it cannot be part of a graph
  std::vector<bool> written; // per argument
  bool writes = false;
};

// A new tensor among the results, and its address at the capture.
struct GraphResult {
  size_t result;  // index of the operator's result
  size_t item;    // index in a list
  bool listed;
  at::Tensor place;
};

struct GraphStep {
  std::shared_ptr<const GraphOperator> op;
  torch::jit::Stack arguments;
  std::vector<GraphResult> results;
  std::vector<GraphAllocation> allocations;
};

struct Graph {
  Graph() : pool(GraphPool::make()) {}
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void replay(bool timed = false);

  GraphPool* pool;
  std::vector<GraphStep> steps;
  int64_t views = 0;   // operators that a replay skips
  int64_t copies = 0;  // results that a kernel put elsewhere at a replay, and that were copied to their address
  std::vector<double> seconds;  // per step, of the last timed replay
};

// Captures on this thread; raises c10::Error on failure.
void begin_graph();
std::unique_ptr<Graph> end_graph();
void abandon_graph();

}  // namespace backplane::cpu
