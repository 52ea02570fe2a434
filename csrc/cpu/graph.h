// A captured call: the operators that its kernels computed, each with its arguments ready on a stack.
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

// What is asked of an operator once per graph.
struct GraphOperator {
  explicit GraphOperator(const c10::OperatorHandle& handle);

  c10::OperatorHandle op;
  std::string name;
  std::optional<c10::SafeKernelFunction> kernel;  // for the host's tensors; none where there is none
  bool in_python = false;    // its operators are recorded in its place
  bool allocates = false;    // and does no more
  std::string refused;       // why it cannot be part of a graph
  std::vector<bool> written; // by argument
  bool writes = false;
};

// A result that is new, and where it lay at the capture.
struct GraphResult {
  size_t result;  // of the operator
  size_t item;    // of a list
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
  int64_t views = 0;   // operators that the replay does without
  int64_t copies = 0;  // results that a replay found elsewhere and brought to their place
  std::vector<double> seconds;  // by step, of the last replay that was timed
};

// On this thread; each says what is wrong by an exception.
void begin_graph();
std::unique_ptr<Graph> end_graph();
void abandon_graph();

}  // namespace backplane::cpu
