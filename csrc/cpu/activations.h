// Activation functions that operators of other files use between their products.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>

namespace backplane::cpu {

// What `moe_experts` puts between its two products; by the names of that operator, whose reference says what each is.
at::Tensor activate_experts(std::string_view name, const at::Tensor& x, double alpha, std::optional<double> limit,
                            double beta);

}  // namespace backplane::cpu
