// Collectives as launches, which is what a graph can hold: they run when their turn comes on the stream, and again at
// every replay. The ranks meet inside the launch, so all of them must queue the same ones in the same order.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "runtime/launch.h"

namespace backplane::sim {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

c10::intrusive_ptr<c10d::Backend> host_backend(const Group& group) { return group->getBackend(c10::DeviceType::CPU); }

void all_reduce(const at::Tensor& tensor, const Group& group, int64_t op) {
  TORCH_CHECK(tensor.is_contiguous(), "a tensor that is reduced in a launch must be contiguous");
  const auto type = static_cast<c10d::ReduceOp::RedOpType>(op);
  enqueue("bpnpu::all_reduce", tensor.device().index(), {{tensor, true}},
          [view = HostView(tensor), backend = host_backend(group), type] {
            std::vector<at::Tensor> tensors{view.tensor()};
            c10d::AllreduceOptions options;
            options.reduceOp = c10d::ReduceOp(type);
            backend->allreduce(tensors, options)->wait();
          });
}

// The output is the pieces of all ranks, one behind the other.
void all_gather(const at::Tensor& output, const at::Tensor& input, const Group& group) {
  TORCH_CHECK(output.is_contiguous() && input.is_contiguous(), "tensors that are gathered in a launch must be contiguous");
  enqueue("bpnpu::all_gather", output.device().index(), {{input, false}, {output, true}},
          [to = HostView(output), from = HostView(input), backend = host_backend(group)] {
            std::vector<at::Tensor> inputs{from.tensor().view(-1)};
            std::vector<std::vector<at::Tensor>> outputs{to.tensor().view({backend->getSize(), -1}).unbind(0)};
            backend->allgather(outputs, inputs)->wait();
          });
}

}  // namespace
}  // namespace backplane::sim

TORCH_LIBRARY_FRAGMENT(bpnpu, library) {
  library.def("all_reduce(Tensor(a!) tensor, __torch__.torch.classes.c10d.ProcessGroup group, int op) -> ()");
  library.def("all_gather(Tensor(a!) output, Tensor input, __torch__.torch.classes.c10d.ProcessGroup group) -> ()");
}

TORCH_LIBRARY_IMPL(bpnpu, PrivateUse1, library) {
  library.impl("all_reduce", &backplane::sim::all_reduce);
  library.impl("all_gather", &backplane::sim::all_gather);
}
