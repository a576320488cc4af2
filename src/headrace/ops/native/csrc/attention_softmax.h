// Attention's scores become weights, a tile of positions at a time (attention.h includes this). What a row does is the same,
// operation by operation, whether or not others go with it.

// What sums under a largest score `before` are multiplied with when it becomes `after`; exactly 1 where they are equal.
INLINE float shrunk(float before, float after) {
  if (before == after) return 1.0f;
  if (before == -__builtin_inff()) return 0.0f;
  float lane[W];
  store(lane, exp(set1(before - after)));
  return lane[0];
}

// Scales, caps and hides scores of a row, of which lanes [low, high) are seen (kWhole: all); the largest of each lane.
template <int kKv, bool kWhole>
INLINE f seen_scores(const Item& item, float* scores, int vectors, int low, int high) {
  const float cap = item.job.soft_cap;
  const f nothing = set1(-__builtin_inff());
  f best = nothing;
  for (int v = 0; v < vectors; ++v) {
    f score = load(scores + v * W);
    if (kKv == kKvInt8) score = mul(score, load(item.key_scales + v * W));
    if (cap != 0.0f) score = mul(set1(cap), tanh(div(score, set1(cap))));
    if (!kWhole) score = keep(score, low - v * W, high - v * W, nothing);
    if (!kWhole || kKv == kKvInt8 || cap != 0.0f) store(scores + v * W, score);
    best = max(score, best);
  }
  return best;
}

// Scores of a row become weights; their sum in each lane.
template <int kKv, bool kWhole>
INLINE f weights_of(const Item& item, float* scores, int vectors, int low, int high, float top) {
  const f shift = set1(top == -__builtin_inff() ? 0.0f : top);  // nothing seen yet: `keep` hides all below
  f mass = zero();
  for (int v = 0; v < vectors; ++v) {
    f weight = exp(sub(load(scores + v * W), shift));
    if (!kWhole) weight = keep(weight, low - v * W, high - v * W, zero());
    store(scores + v * W, kKv == kKvInt8 ? mul(weight, load(item.value_scales + v * W)) : weight);
    mass = add(mass, weight);
  }
  return mass;
}

// What a tile shows to a row: lanes [low, high).
struct Seen {
  int low, high;
  bool whole;
};
INLINE Seen seen_by(const Item& item, int row, int tile_start) {
  const int position = item.positions[row / item.group], window = item.job.window;
  const int low = window ? position - window + 1 - tile_start : 0, high = position + 1 - tile_start;
  return {low, high, low <= 0 && high >= kTile};
}

template <int kKv>
INLINE f best_of(const Item& item, int row, const Seen& seen, int vectors) {
  float* scores = item.scores + row * kTile;
  return seen.whole ? seen_scores<kKv, true>(item, scores, kTile / W, 0, kTile)
                    : seen_scores<kKv, false>(item, scores, vectors, seen.low, seen.high);
}

template <int kKv>
INLINE void weigh(const Item& item, int row, const Seen& seen, int vectors, float shrink) {
  float *scores = item.scores + row * kTile, *kept = item.state.mass + row * W;
  const f mass = seen.whole ? weights_of<kKv, true>(item, scores, kTile / W, 0, kTile, item.state.top[row])
                            : weights_of<kKv, false>(item, scores, vectors, seen.low, seen.high, item.state.top[row]);
  item.shrink[row] = shrink;
  store(kept, fma(load(kept), set1(shrink), mass));
}

// Scores of the query vectors at hand become weights, and `shrink` what the sums so far are to be multiplied with.
// Sixteen rows at a time share the work of finding largest scores and of e to their differences.
template <int kKv>
INLINE void softmax_rows(const Item& item, int tile_start, int vectors) {
  constexpr int kTogether = 16;
  float* top = item.state.top;
  int row = item.first_row;
  for (; row + kTogether <= item.end_row; row += kTogether) {
    alignas(64) float best[kTogether * W], found[kTogether], shrink[kTogether];
    for (int r = 0; r < kTogether; ++r)
      store(best + r * W, best_of<kKv>(item, row + r, seen_by(item, row + r, tile_start), vectors));
    reduce_max_rows(best, found);
    float before[kTogether];
    for (int r = 0; r < kTogether; ++r) {
      before[r] = top[row + r];
      top[row + r] = found[r] > before[r] ? found[r] : before[r];
      shrink[r] = before[r] == top[row + r] ? 0.0f : before[r] - top[row + r];
    }
    for (int r = 0; r < kTogether; r += W) store(shrink + r, exp(load(shrink + r)));
    for (int r = 0; r < kTogether; ++r) {
      const bool first = before[r] == -__builtin_inff() && top[row + r] != before[r];
      weigh<kKv>(item, row + r, seen_by(item, row + r, tile_start), vectors, first ? 0.0f : shrink[r]);
    }
  }
  for (; row < item.end_row; ++row) {
    const Seen seen = seen_by(item, row, tile_start);
    const float before = top[row], found = reduce_max(best_of<kKv>(item, row, seen, vectors));
    top[row] = found > before ? found : before;
    weigh<kKv>(item, row, seen, vectors, shrunk(before, top[row]));
  }
}
