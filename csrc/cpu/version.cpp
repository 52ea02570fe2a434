// What this library was built from, for `vllm-backplane doctor`. Readable without PyTorch's dispatcher, so it
// can be asked before any operator is looked at.

#ifndef BACKPLANE_VERSION
#error "built by setup.py, which defines BACKPLANE_VERSION and BACKPLANE_TORCH_VERSION"
#endif

extern "C" __attribute__((visibility("default"))) const char* backplane_cpu_kernels_version() {
  return BACKPLANE_VERSION " for torch " BACKPLANE_TORCH_VERSION;
}
