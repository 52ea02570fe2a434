// Declares the activation functions that other operators apply between their matrix products.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace backplane::cpu {

// Applies the activation between the two GEMMs of `moe_experts`. The reference of that operator defines the names.
at::Tensor activate_experts(std::string_view name, const at::Tensor& x, double alpha, std::optional<double> limit,
                            double beta);

}  // namespace backplane::cpu
