#include "internal/parallel/experts/products.h"

#include <ATen/ATen.h>
#include <ATen/ops/_grouped_mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>

#include "internal/device/matrix.h"
#include "shardproof/nn/gradient_place.h"

namespace shardproof {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Runs `visit` with the expert, the first row and the number of rows of each block that has rows.
template <class Visit>
void each_block(const std::vector<int64_t>& blocks, int64_t experts, Visit visit) {
  int64_t begin = 0;
  for (size_t i = 0; i < blocks.size(); begin += blocks[i++])
    if (blocks[i] > 0) visit(static_cast<int64_t>(i) % experts, begin, blocks[i]);
}

// Runs `visit` with the first row and the number of rows of each source that has rows, and where its blocks end from there on.
template <class Visit>
void each_source(const std::vector<int64_t>& blocks, int64_t experts, const at::Tensor& rows, Visit visit) {
  std::vector<int32_t> ends(blocks.size());
  std::vector<int64_t> begins(1, 0);
  for (auto from = blocks.begin(); from != blocks.end(); from += experts) {
    std::inclusive_scan(from, from + experts, ends.begin() + (from - blocks.begin()));
    begins.push_back(begins.back() + ends[static_cast<size_t>(from - blocks.begin() + experts - 1)]);
  }
  const at::Tensor there = at::tensor(ends, at::kInt).to(rows.device(), /*non_blocking=*/true).view({-1, experts});
  for (size_t source = 0; source + 1 < begins.size(); ++source) {
    const int64_t count = begins[source + 1] - begins[source];
    if (count > 0) visit(begins[source], count, there.select(0, static_cast<int64_t>(source)));
  }
}

// Rows times matrices [experts, columns of rows, n].
at::Tensor grouped_rows(const at::Tensor& rows, const at::Tensor& matrices, const std::vector<int64_t>& blocks) {
  std::vector<at::Tensor> products;
  each_source(blocks, matrices.size(0), rows, [&](int64_t begin, int64_t count, const at::Tensor& ends) {
    products.push_back(at::_grouped_mm(rows.narrow(0, begin, count), matrices, ends));
  });
  if (products.empty()) return at::empty({0, matrices.size(2)}, rows.options());
  return products.size() == 1 ? products.front() : at::cat(products);
}

void grouped_weight_gradient(const at::Tensor& dy, const at::Tensor& x, const std::vector<int64_t>& blocks,
                             const at::Tensor& dw) {
  bool begun = false;
  each_source(blocks, dw.size(0), x, [&](int64_t begin, int64_t count, const at::Tensor& ends) {
    const at::Tensor terms = at::_grouped_mm(dy.narrow(0, begin, count).t(), x.narrow(0, begin, count), ends);
    begun ? dw.add_(terms) : dw.copy_(terms);
    begun = true;
  });
  if (!begun) dw.zero_();
}

void weight_gradient(const at::Tensor& dy, const at::Tensor& x, const std::vector<int64_t>& blocks, const at::Tensor& dw) {
  std::vector<bool> begun(static_cast<size_t>(dw.size(0)), false);
  each_block(blocks, dw.size(0), [&](int64_t expert, int64_t begin, int64_t rows) {
    at::Tensor sum = dw.select(0, expert);
    const at::Tensor left = dy.narrow(0, begin, rows).t(), right = x.narrow(0, begin, rows);
    if (begun[static_cast<size_t>(expert)])
      sum.add_(at::mm(left, right));
    else
      at::mm_out(sum, left, right);
    begun[static_cast<size_t>(expert)] = true;
  });
  for (size_t expert = 0; expert < begun.size(); ++expert)
    if (!begun[expert]) dw.select(0, static_cast<int64_t>(expert)).zero_();
}

struct Products : torch::autograd::Function<Products> {
  static Variable forward(AutogradContext* ctx, const Variable& x, const Variable& weight, const std::vector<int64_t>& blocks,
                          bool grouped) {
    ctx->save_for_backward({x, weight});
    ctx->saved_data["blocks"] = blocks;
    ctx->saved_data["grouped"] = grouped;
    if (grouped) return grouped_rows(x, weight.transpose(1, 2), blocks);
    at::Tensor y = at::empty({x.size(0), weight.size(1)}, x.options());
    each_block(blocks, weight.size(0), [&](int64_t expert, int64_t begin, int64_t rows) {
      at::Tensor place = y.narrow(0, begin, rows);
      at::mm_out(place, x.narrow(0, begin, rows), weight.select(0, expert).t());
    });
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const at::Tensor dy = dys[0].contiguous();
    const std::vector<int64_t> blocks = ctx->saved_data["blocks"].toIntVector();
    const bool grouped = ctx->saved_data["grouped"].toBool();
    at::Tensor dx, dw;
    if (ctx->needs_input_grad(0) && grouped) {
      dx = grouped_rows(dy, weight, blocks);
    } else if (ctx->needs_input_grad(0)) {
      dx = at::empty_like(x);
      each_block(blocks, weight.size(0), [&](int64_t expert, int64_t begin, int64_t rows) {
        dx.narrow(0, begin, rows)
            .copy_(gradient_of_rows(dy.narrow(0, begin, rows), x.narrow(0, begin, rows), weight.select(0, expert)));
      });
    }
    if (ctx->needs_input_grad(1)) {
      dw = direct::place_of_gradient(weight);
      if (!dw.defined()) dw = at::empty_like(weight);
      grouped ? grouped_weight_gradient(dy, x, blocks, dw) : weight_gradient(dy, x, blocks, dw);
    }
    return {dx, dw, {}, {}};
  }
};

}  // namespace

bool suit_groups(const at::Tensor& x, const at::Tensor& weight) {
  const auto fits = [](const at::Tensor& one) {
    return one.scalar_type() == at::kBFloat16 && one.is_contiguous() &&
           reinterpret_cast<uintptr_t>(one.const_data_ptr()) % 16 == 0;
  };
  const auto has_width = [&](int64_t width) { return width > 0 && width * x.element_size() % 16 == 0; };
  return fits(x) && fits(weight) && weight.size(0) > 0 && has_width(weight.size(1)) && has_width(weight.size(2));
}

at::Tensor expert_products(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& blocks, bool grouped) {
  return Products::apply(x, weight, blocks, grouped);
}

}  // namespace shardproof
