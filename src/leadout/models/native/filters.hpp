// Top-k, then top-p, then min-p over unnormalised weights: a histogram by magnitude finds the bin in which the limit lies,
// only that bin is sorted.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace leadout {

// Non-negative floats order as their bits do: exponent and four bits of mantissa make a bin.
constexpr int kBins = 1 << 12, kBinShift = 19;

inline int bin_of(float weight) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return static_cast<int>(bits >> kBinShift) & (kBins - 1);
}

// Weights of one bin with their places, largest first, equal ones by place.
inline void sorted_bin(const float* row, int size, int bin, std::vector<std::pair<float, int>>& out) {
  out.clear();
  for (int v = 0; v < size; ++v)
    if (bin_of(row[v]) == bin) out.emplace_back(row[v], v);
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) {
    return a.first > b.first || (a.first == b.first && a.second < b.second);
  });
}

// What is kept: larger weights than `edge`, and of equal ones the first `ties`.
struct Edge {
  float edge = 0.0f;
  int64_t ties = INT64_MAX;
};

// Ties at the k-th are all kept; top-p keeps the smallest set that holds its share of what top-k left, ties by place;
// min-p is relative to the largest. top_k <= 0, top_p >= 1 and min_p <= 0 switch each off.
inline void filter_row(const float* row, int size, int64_t top_k, double top_p, double min_p, float* out) {
  thread_local std::vector<int> count;
  thread_local std::vector<double> mass;
  thread_local std::vector<std::pair<float, int>> inside;
  count.assign(kBins, 0);
  mass.assign(kBins, 0.0);
  float largest = 0.0f;
  for (int v = 0; v < size; ++v) {
    const int bin = bin_of(row[v]);
    ++count[bin];
    mass[bin] += row[v];
    largest = std::max(largest, row[v]);
  }
  float least = 0.0f;
  if (top_k > 0 && top_k < size) {
    int bin = kBins - 1;
    int64_t above = 0;
    while (bin > 0 && above + count[bin] < top_k) above += count[bin--];
    sorted_bin(row, size, bin, inside);
    least = inside[std::min<int64_t>(top_k - above, static_cast<int64_t>(inside.size())) - 1].first;
    mass[bin] = 0.0;
    for (const auto& item : inside)
      if (item.first >= least) mass[bin] += item.first;
    std::fill(mass.begin(), mass.begin() + bin, 0.0);
  }
  Edge kept;
  if (top_p < 1.0) {
    double all = 0.0, above = 0.0;
    for (double m : mass) all += m;
    const double target = top_p * all;
    int bin = kBins - 1;
    while (bin > 0 && above + mass[bin] < target) above += mass[bin--];
    sorted_bin(row, size, bin, inside);
    kept = {least, INT64_MAX};
    for (size_t i = 0, first = 0; i < inside.size() && inside[i].first >= least; ++i) {
      if (inside[i].first != inside[first].first) first = i;
      above += inside[i].first;
      if (above >= target) {
        kept = {inside[i].first, static_cast<int64_t>(i - first) + 1};
        break;
      }
    }
  }
  const double floor = min_p * static_cast<double>(largest);
  for (int v = 0; v < size; ++v) {
    const float w = row[v];
    bool keep = w >= least && w >= floor && w >= kept.edge;
    if (keep && w == kept.edge) keep = kept.ties-- > 0;
    out[v] = keep ? w : 0.0f;
  }
}

}  // namespace leadout
