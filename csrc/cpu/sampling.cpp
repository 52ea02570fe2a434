// Computes the arg-max and the masks of min-p, top-k and top-p, without sorting the vocabulary.
//
// Top-k and top-p need one threshold per row. The k-th largest logit is found in one pass that keeps the candidates so
// far; logits at or below the current bar are skipped a vector at a time. The threshold of top-p lies in one of many
// buckets of nearly equal logits, found by their probability mass; only that bucket is sorted.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "arg_max.h"
#include "vector_math.h"

namespace backplane::cpu {
namespace {

constexpr int64_t kSortAtOnce = 4096;  // up to this many, sorting is faster than buckets
// Beyond this distance from the largest logit, even 2^18 tokens have less mass than the smallest 1 - p.
constexpr int64_t kBuckets = 4096;
constexpr float kBucketsPerUnit = 128.0f;

at::Tensor greedy_argmax(const at::Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "greedy_argmax: logits have shape ", logits.sizes(),
              "; they must be [batch, vocabulary] and not empty");
  if (!is_float_type(logits.scalar_type())) return logits.argmax(-1);
  const at::Tensor from = logits.stride(1) == 1 ? logits : logits.contiguous();
  at::Tensor out = at::empty({from.size(0)}, logits.options().dtype(at::kLong));
  with_float_type(from.scalar_type(), "greedy_argmax", [&](auto tag) {
    using T = decltype(tag);
    const T* data = elements<T>(from);
    const int64_t stride = from.stride(0);
    const auto search = pick<ArgMax<T>>();
    first_of_largest(from.size(0), from.size(1), out.mutable_data_ptr<int64_t>(),
                     [&](int64_t row, int64_t start, int64_t count) {
                       Best best;
                       search(data + row * stride + start, count, &best);
                       return best;
                     });
  });
  return out;
}

// Keeps the k largest and some more. Returns false if a NaN or an infinity requires the general formula for this row.
struct KeepAbove {
  template <int W, int N>
  static BACKPLANE_INLINE void append(const float* x, float bar, std::vector<float>* kept) {
    for (int i = 0; i < N; i += W) {
      if (!(largest<W>(load<W>(x + i)) > bar)) continue;
      for (int j = i; j < i + W; ++j)
        if (x[j] > bar) kept->push_back(x[j]);
    }
  }

  template <int W>
  static BACKPLANE_INLINE bool run(const float* x, int64_t n, int64_t k, std::vector<float>* kept) {
    const size_t room = static_cast<size_t>(k) + std::max<size_t>(256, k);
    float bar = -kInfinity;
    Floats<W> odd{};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
      Floats<W> top = all<W>(-kInfinity);
      for (int part = 0; part < 4; ++part) {
        const Floats<W> v = load<W>(x + i + part * W);
        odd = v < kInfinity ? odd : all<W>(1.0f);
        top = larger<W>(v, top);
      }
      if (!(largest<W>(top) > bar)) continue;
      append<W, 4 * W>(x + i, bar, kept);
      if (kept->size() >= room) {
        std::nth_element(kept->begin(), kept->begin() + (k - 1), kept->end(), std::greater<float>());
        kept->resize(k);
        bar = kept->back();
      }
    }
    bool fine = sum<W>(odd) == 0.0f;
    for (; i < n; ++i) {
      fine &= x[i] < kInfinity;
      if (x[i] > bar) kept->push_back(x[i]);
    }
    return fine;
  }
};

// Collects everything from `bar` on.
struct CollectFrom {
  template <int W>
  static BACKPLANE_INLINE void run(const float* x, int64_t n, float bar, std::vector<float>* kept) {
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
      const Floats<W> a = larger<W>(load<W>(x + i), load<W>(x + i + W));
      const Floats<W> b = larger<W>(load<W>(x + i + 2 * W), load<W>(x + i + 3 * W));
      if (largest<W>(larger<W>(a, b)) < bar) continue;
      for (int64_t j = i; j < i + 4 * W; ++j)
        if (x[j] >= bar) kept->push_back(x[j]);
    }
    for (; i < n; ++i)
      if (x[i] >= bar) kept->push_back(x[i]);
  }
};

// Writes exp(x - peak) into `weights`; returns their sum.
struct Weigh {
  template <int W>
  static BACKPLANE_INLINE double run(const float* x, int64_t n, float peak, float* weights) {
    double total = 0;
    for (int64_t start = 0; start < n; start += kStretch) {
      const int64_t end = n < start + kStretch ? n : start + kStretch;
      Floats<W> part{};
      int64_t i = start;
      for (; i + W <= end; i += W) {
        const Floats<W> w = exponential<W>(load<W>(x + i) - peak);
        store<W>(weights + i, w);
        part += w;
      }
      if (i < end) {
        const Floats<W> w = exponential<W>(read_some<W>(x + i, end - i) - peak);
        write_some<W>(weights + i, w, end - i);
        for (int64_t j = i; j < end; ++j) total += weights[j];
      }
      total += sum<W>(part);
    }
    return total;
  }
};

// `fine` means: no NaN, and no infinity except the -inf of masked tokens.
struct Largest {
  template <int W>
  static BACKPLANE_INLINE void run(const float* x, int64_t n, float* top, bool* fine) {
    Floats<W> peak[2] = {all<W>(-kInfinity), all<W>(-kInfinity)};
    Floats<W> odd[2] = {};
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W) {
      for (int part = 0; part < 2; ++part) {
        const Floats<W> v = load<W>(x + i + part * W);
        odd[part] = v < kInfinity ? odd[part] : all<W>(1.0f);
        peak[part] = larger<W>(v, peak[part]);
      }
    }
    *top = largest<W>(larger<W>(peak[0], peak[1]));
    *fine = sum<W>(odd[0] + odd[1]) == 0.0f;
    for (; i < n; ++i) {
      *fine &= x[i] < kInfinity;
      *top = x[i] > *top ? x[i] : *top;
    }
  }
};

struct MaskBelow {
  template <int W>
  static BACKPLANE_INLINE void run(float* x, int64_t n, float bar) {
    int64_t i = 0;
    for (; i + W <= n; i += W) {
      const Floats<W> v = load<W>(x + i);
      store<W>(x + i, v < bar ? all<W>(-kInfinity) : v);
    }
    for (; i < n; ++i)
      if (x[i] < bar) x[i] = -kInfinity;
  }
};

// Masks tokens less likely than `share` of the most likely one. Logits below `low`, which is less than the logarithm of
// the share, are nearly all tokens; they are masked without computing the exponential.
struct MaskUnlikely {
  template <int W>
  static BACKPLANE_INLINE Floats<W> likely(Floats<W> v, float peak, float share) {
    return exponential<W>(v - peak) < share ? all<W>(-kInfinity) : v;
  }

  template <int W>
  static BACKPLANE_INLINE void run(float* x, int64_t n, float peak, float share, float low) {
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
      const Floats<W> a = load<W>(x + i), b = load<W>(x + i + W), c = load<W>(x + i + 2 * W), d = load<W>(x + i + 3 * W);
      const bool weigh = !(largest<W>(larger<W>(larger<W>(a, b), larger<W>(c, d))) - peak < low);
      store<W>(x + i, weigh ? likely<W>(a, peak, share) : all<W>(-kInfinity));
      store<W>(x + i + W, weigh ? likely<W>(b, peak, share) : all<W>(-kInfinity));
      store<W>(x + i + 2 * W, weigh ? likely<W>(c, peak, share) : all<W>(-kInfinity));
      store<W>(x + i + 3 * W, weigh ? likely<W>(d, peak, share) : all<W>(-kInfinity));
    }
    for (; i < n; i += W) {
      const int64_t count = n - i < W ? n - i : W;
      write_some<W>(x + i, likely<W>(read_some<W>(x + i, count), peak, share), count);
    }
  }
};

// The smallest value that is kept, and how many values equal to it are still dropped.
struct Border {
  float value = -kInfinity;
  int64_t dropped_equals = 0;
};

// Drops values in ascending order while the dropped mass does not exceed `allowed`; `keep_last` spares the largest.
Border walk(std::vector<float>& values, float peak, double dropped, double allowed, bool keep_last) {
  std::sort(values.begin(), values.end());
  Border border;
  const size_t end = values.size() - (keep_last ? 1 : 0);
  size_t i = 0;
  for (; i < end; ++i) {
    dropped += std::exp(values[i] - peak);
    if (dropped > allowed) break;
  }
  // If all are dropped here, everything above is kept.
  border.value = i < values.size() ? values[i] : std::nextafter(values.back(), kInfinity);
  for (size_t j = i; j > 0 && values[j - 1] == border.value; --j) ++border.dropped_equals;
  return border;
}

// Computes the threshold of top-p over finite values or -inf, of which `peak` is the largest.
Border nucleus(const float* x, int64_t n, float peak, float p, std::vector<float>& buffer) {
  const double share = static_cast<double>(1.0f - p);
  buffer.resize(n);
  const double total = pick<Weigh>()(x, n, peak, buffer.data()), allowed = share * total;
  if (n <= kSortAtOnce) {
    std::vector<float> values(x, x + n);
    return walk(values, peak, 0.0, allowed, true);
  }
  std::vector<double> mass(kBuckets, 0.0);
  const auto bucket = [peak](float value) {
    const float distance = (peak - value) * kBucketsPerUnit;
    return distance < kBuckets - 1 ? static_cast<int64_t>(distance) : kBuckets - 1;
  };
  for (int64_t i = 0; i < n; ++i) mass[bucket(x[i])] += buffer[i];
  double dropped = 0;
  int64_t last = kBuckets - 1;
  while (last > 0 && dropped + mass[last] <= allowed) dropped += mass[last--];
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i)
    if (bucket(x[i]) == last) values.push_back(x[i]);
  return walk(values, peak, dropped, allowed, last == 0);
}

// The formula of the operator's reference, for rows with NaN or infinite logits.
void mask_by_sorting(const at::Tensor& row, std::optional<int64_t> k, std::optional<float> p) {
  auto [ascending, order] = row.sort(-1);
  at::Tensor dropped = at::zeros_like(ascending, at::kBool);
  if (k) dropped.logical_or_(ascending.lt(ascending.select(0, row.size(0) - *k)));
  if (p) {
    const at::Tensor mass = ascending.masked_fill(dropped, -kInfinity).softmax(-1).cumsum(-1);
    at::Tensor outside = mass.le(1.0f - *p);
    outside.select(0, row.size(0) - 1).fill_(false);
    dropped.logical_or_(outside);
  }
  row.masked_fill_(at::zeros_like(dropped).scatter_(0, order, dropped), -kInfinity);
}

struct Buffers {
  std::vector<float> kept, work;
};

// Returns false if the row needs the general formula; the row is then unchanged.
bool mask_row(float* x, int64_t n, std::optional<int64_t> k, std::optional<float> p, Buffers& buffers) {
  Border border;
  const float* candidates = x;
  int64_t count = n;
  float peak = -kInfinity;
  if (k) {
    auto& kept = buffers.kept;
    kept.clear();
    if (!pick<KeepAbove>()(x, n, *k, &kept)) return false;
    if (static_cast<int64_t>(kept.size()) >= *k) {
      std::nth_element(kept.begin(), kept.begin() + (*k - 1), kept.end(), std::greater<float>());
      border.value = kept[*k - 1];
    }
    if (p) {
      // Everything equal to the k-th is kept, and values equal to the bar were not collected.
      kept.clear();
      pick<CollectFrom>()(x, n, std::max(border.value, std::numeric_limits<float>::lowest()), &kept);
      candidates = kept.data();
      count = kept.size();
    }
  }
  if (p && count > 0) {
    bool fine = true;
    pick<Largest>()(candidates, count, &peak, &fine);
    if (!fine) return false;
    if (peak > -kInfinity) border = nucleus(candidates, count, peak, *p, buffers.work);
  }
  pick<MaskBelow>()(x, n, border.value);
  for (int64_t i = 0; border.dropped_equals > 0 && i < n; ++i) {
    if (x[i] != border.value) continue;
    x[i] = -kInfinity;
    --border.dropped_equals;
  }
  return true;
}

void top_k_top_p_mask(const at::Tensor& logits, const std::optional<at::Tensor>& k,
                      const std::optional<at::Tensor>& p) {
  const char* name = "top_k_top_p_mask";
  if (!k && !p) return;
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat, name, ": logits must be float32 [batch, "
              "vocabulary], got ", logits.scalar_type(), " ", logits.sizes());
  const int64_t rows = logits.size(0), n = logits.size(1);
  TORCH_CHECK(!k || (k->dim() == 1 && k->size(0) == rows), name, ": k has shape ", k->sizes(), " for ", rows, " rows");
  TORCH_CHECK(!p || (p->dim() == 1 && p->size(0) == rows), name, ": p has shape ", p->sizes(), " for ", rows, " rows");
  if (rows == 0 || n == 0) return;
  const at::Tensor work = logits.stride(1) == 1 ? logits : logits.contiguous();
  std::optional<Integers> counts;
  if (k) counts.emplace(*k, name);
  const at::Tensor shares = p ? p->to(at::kFloat).contiguous() : at::Tensor();
  const float* share = p ? shares.const_data_ptr<float>() : nullptr;
  float* data = work.mutable_data_ptr<float>();
  const int64_t stride = work.stride(0);
  std::vector<char> left(rows, 0);
  const auto limit_of = [&](int64_t row) -> std::optional<int64_t> {
    if (!k) return std::nullopt;
    const int64_t value = std::clamp<int64_t>((*counts)[row], 1, n);
    return value == n ? std::nullopt : std::optional<int64_t>(value);
  };
  const auto share_of = [&](int64_t row) -> std::optional<float> {
    return p && share[row] < 1.0f ? std::optional<float>(share[row]) : std::nullopt;
  };
  at::parallel_for(0, rows, rows_per_thread(2 * n), [&](int64_t begin, int64_t end) {
    Buffers buffers;
    for (int64_t r = begin; r < end; ++r) {
      const auto limit = limit_of(r);
      const auto part = share_of(r);
      if (limit || part) left[r] = !mask_row(data + r * stride, n, limit, part, buffers);
    }
  });
  for (int64_t r = 0; r < rows; ++r)
    if (left[r]) mask_by_sorting(work.select(0, r), limit_of(r), share_of(r));
  if (!work.is_same(logits)) logits.copy_(work);
}

// A row with a NaN or an infinite logit, or with no token left, has no probabilities to compare; it stays unchanged.
void min_p_mask(const at::Tensor& logits, const at::Tensor& min_p) {
  const char* name = "min_p_mask";
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat, name, ": logits must be float32 [batch, "
              "vocabulary], got ", logits.scalar_type(), " ", logits.sizes());
  const int64_t rows = logits.size(0), n = logits.size(1);
  TORCH_CHECK(min_p.numel() == rows, name, ": min_p has shape ", min_p.sizes(), " for ", rows, " rows");
  if (rows == 0 || n == 0) return;
  const at::Tensor work = logits.stride(1) == 1 ? logits : logits.contiguous();
  const at::Tensor shares = min_p.to(at::kFloat).contiguous();
  const float* share = shares.const_data_ptr<float>();
  float* data = work.mutable_data_ptr<float>();
  const int64_t stride = work.stride(0);
  const auto find_peak = pick<Largest>();
  const auto mask = pick<MaskUnlikely>();
  constexpr float kSlack = 1e-3f;  // far larger than the error of logarithm and exponential
  const int64_t pieces = (n + kPiece - 1) / kPiece;
  const auto each_piece = [&](const auto& call) {  // of the rows that have a min_p
    at::parallel_for(0, rows * pieces, rows_per_thread(std::min(n, kPiece) / 2), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / pieces, start = i % pieces * kPiece;
        if (share[row] > 0.0f) call(row, i, data + row * stride + start, std::min(kPiece, n - start));
      }
    });
  };
  std::vector<Best> peaks(rows * pieces);
  each_piece([&](int64_t, int64_t piece, const float* x, int64_t count) {
    bool fine = true;
    find_peak(x, count, &peaks[piece].value, &fine);
    if (!fine) peaks[piece].value = std::numeric_limits<float>::quiet_NaN();
  });
  each_piece([&](int64_t row, int64_t, float* x, int64_t count) {
    Best peak = peaks[row * pieces];
    for (int64_t p = 1; p < pieces; ++p) peak.merge(peaks[row * pieces + p]);
    if (peak.value > -kInfinity) mask(x, count, peak.value, share[row], std::log(share[row]) - kSlack);
  });
  if (!work.is_same(logits)) logits.copy_(work);
}

}  // namespace
}  // namespace backplane::cpu

TORCH_LIBRARY_IMPL(backplane, CPU, library) {
  library.impl("greedy_argmax", &backplane::cpu::greedy_argmax);
  library.impl("min_p_mask", &backplane::cpu::min_p_mask);
  library.impl("top_k_top_p_mask", &backplane::cpu::top_k_top_p_mask);
}
