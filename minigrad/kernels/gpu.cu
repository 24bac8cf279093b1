// Kernels of one pass over memory; gpu.py compiles and launches them. Compiled for
//   BF16, F16 or neither   the type T of the arrays: bfloat16, float16 or float32; everything is computed in float32
//   N                      the width of a row, for kernels that hold one
//   VECTORS                1: rows begin at multiples of 16 bytes, so that 8 neighbours are loaded at once
// A warp works on a row: its 32 threads hold 8 neighbours each at a time. Everything is deterministic: the one atomic
// counts blocks.

typedef long long Index;

#if defined(BF16)
typedef unsigned short T;  // the bits: the upper half of a float
__device__ inline float wide(T x) { return __uint_as_float((unsigned)x << 16); }
__device__ inline unsigned pack(float a, float b) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}
#elif defined(F16)
typedef unsigned short T;
__device__ inline float wide(T x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ inline unsigned pack(float a, float b) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}
#else
typedef float T;
#endif

struct V8 {
  float v[8];
};

// LAST: nobody will want this memory soon, so that the caches keep something else.
template <bool LAST, class Word>
__device__ inline Word load_word(const Word* p) {
  return LAST ? __ldcs(p) : *p;
}
template <bool LAST, class Word>
__device__ inline void store_word(Word* p, Word x) {
  if (LAST) __stcs(p, x);
  else *p = x;
}
template <bool LAST = false>
__device__ inline V8 load_vector(const float* p) {
  float4 a = load_word<LAST>((const float4*)p), b = load_word<LAST>((const float4*)p + 1);
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
}
template <bool LAST = false>
__device__ inline void store_vector(float* p, const V8& x) {
  store_word<LAST>((float4*)p, make_float4(x.v[0], x.v[1], x.v[2], x.v[3]));
  store_word<LAST>((float4*)p + 1, make_float4(x.v[4], x.v[5], x.v[6], x.v[7]));
}
__device__ inline float number(float x) { return x; }
__device__ inline void put(float* p, float x) { *p = x; }
__device__ inline V8 unpack(const V8& x) { return x; }
#if defined(BF16) || defined(F16)
__device__ inline V8 unpack(uint4 u) {
  unsigned words[4] = {u.x, u.y, u.z, u.w};
  V8 x;
#pragma unroll
  for (int i = 0; i < 4; i++) x.v[2 * i] = wide(words[i] & 0xffff), x.v[2 * i + 1] = wide(words[i] >> 16);
  return x;
}
typedef uint4 Packed;  // 8 of T
__device__ inline Packed load_packed(const T* p) { return *(const uint4*)p; }
template <bool LAST = false>
__device__ inline V8 load_vector(const T* p) {
  return unpack(load_word<LAST>((const uint4*)p));
}
template <bool LAST = false>
__device__ inline void store_vector(T* p, const V8& x) {
  uint4 word = make_uint4(pack(x.v[0], x.v[1]), pack(x.v[2], x.v[3]), pack(x.v[4], x.v[5]), pack(x.v[6], x.v[7]));
  store_word<LAST>((uint4*)p, word);
}
__device__ inline float number(T x) { return wide(x); }
__device__ inline void put(T* p, float x) { *p = (T)pack(x, x); }
#else
typedef V8 Packed;
__device__ inline Packed load_packed(const T* p) { return load_vector(p); }
#endif

// 8 neighbours from place c of a row of n, or what is left of them.
template <bool LAST = false, class P>
__device__ inline V8 load8(const P* row, Index c, Index n, bool vectors) {
  if (vectors && c + 8 <= n) return load_vector<LAST>(row + c);
  V8 x;
#pragma unroll
  for (int j = 0; j < 8; j++) x.v[j] = c + j < n ? number(row[c + j]) : 0;
  return x;
}
template <bool LAST = false, class P>
__device__ inline void store8(P* row, Index c, Index n, bool vectors, const V8& x) {
  if (vectors && c + 8 <= n) return store_vector<LAST>(row + c, x);
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (c + j < n) put(row + c + j, x.v[j]);
}

__device__ inline Index thread_index() { return blockIdx.x * (Index)blockDim.x + threadIdx.x; }
__device__ inline Index warp_index() { return thread_index() / 32; }
template <class F, class Join>
__device__ inline F warp_join(F x, Join join) {
  for (int d = 16; d; d /= 2) x = join(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
// Every thread of the block gets what all have together; `none` adds nothing to it.
template <class F, class Join>
__device__ inline F block_join(F x, F none, Join join) {
  __shared__ F part[33];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  x = warp_join(x, join);
  __syncthreads();
  if (!lane) part[warp] = x;
  __syncthreads();
  if (!warp) {
    x = warp_join(lane < (blockDim.x + 31) / 32 ? part[lane] : none, join);
    if (!lane) part[32] = x;
  }
  __syncthreads();
  return part[32];
}
struct Sum {
  template <class F>
  __device__ F operator()(F a, F b) const { return a + b; }
};
struct Most {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ unsigned operator()(unsigned a, unsigned b) const { return a > b ? a : b; }
};
__device__ inline float warp_sum(float x) { return warp_join(x, Sum()); }
template <class F>
__device__ inline F block_sum(F x) { return block_join(x, F(0), Sum()); }
__device__ inline float block_max(float x) { return block_join(x, -__int_as_float(0x7f800000), Most()); }
// Magnitudes of floats are ordered as their bits are, nan above all.
__device__ inline unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }

// The sum of exp(x - top), one vector after the other; the largest so far is never below what is finite, so that -inf
// adds 0, and nan and inf make the sum nan.
struct ExpSum {
  float top = -3.4028235e38f, total = 0;
  __device__ void add(const V8& x, Index c, Index n, float scale) {
    float before = top;
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (c + j < n) top = fmaxf(top, x.v[j] * scale);
    total *= __expf(before - top);
#pragma unroll
    for (int j = 0; j < 8; j++)
      if (c + j < n) total += __expf(x.v[j] * scale - top);
  }
  __device__ float of_block(float& highest) {
    highest = block_max(top);
    return block_sum(total * __expf(top - highest));
  }
};

#ifdef N  // ---- rows of one width, held in registers -----------------------------------------------------------

struct Row {
  static const int K = (N / 8 + (N % 8 > 0) + 31) / 32;  // times that the warp's 256 places are needed
  float v[K * 8];

  // f(i, c) for each of this thread's numbers v[i], which stands in column c
  template <class F>
  __device__ static void each(F f) {
#pragma unroll
    for (int k = 0; k < K; k++) {
      int c = 8 * (k * 32 + threadIdx.x % 32);
#pragma unroll
      for (int j = 0; j < 8; j++)
        if (N % 8 ? c + j < N : c < N) f(8 * k + j, c + j);
    }
  }
  template <class P>
  __device__ void load(const P* row) {
#pragma unroll
    for (int k = 0; k < K; k++) {
      int c = 8 * (k * 32 + threadIdx.x % 32);
      V8 x = {};
      if (c < N) x = load8(row, c, N, VECTORS);
#pragma unroll
      for (int j = 0; j < 8; j++) v[8 * k + j] = x.v[j];
    }
  }
  // The row, plus one that is added where there is one.
  template <class P>
  __device__ void store(P* row, const P* beside = 0) const {
#pragma unroll
    for (int k = 0; k < K; k++) {
      int c = 8 * (k * 32 + threadIdx.x % 32);
      V8 x;
#pragma unroll
      for (int j = 0; j < 8; j++) x.v[j] = v[8 * k + j];
      if (c < N && beside) {
        V8 y = load8(beside, c, N, VECTORS);
#pragma unroll
        for (int j = 0; j < 8; j++) x.v[j] += y.v[j];
      }
      if (c < N) store8(row, c, N, VECTORS, x);
    }
  }
  __device__ float sum() const {
    float total = 0;
    each([&](int i, int) { total += v[i]; });
    return warp_sum(total);
  }
};

extern "C" __global__ void layer_norm(const T* x, const T* gain, const T* bias, T* y, float* mean, float* inverse,
                                      Index rows, float eps) {
  Index row = warp_index();
  if (row >= rows) return;
  Row h, a, b;
  h.load(x + row * N), a.load(gain), b.load(bias);
  float m = h.sum() / N, squares = 0;
  Row::each([&](int i, int) { h.v[i] -= m, squares += h.v[i] * h.v[i]; });
  float inv = 1 / sqrtf(warp_sum(squares) / N + eps);
  Row::each([&](int i, int) { h.v[i] = h.v[i] * inv * a.v[i] + b.v[i]; });
  h.store(y + row * N);
  if (threadIdx.x % 32 == 0) mean[row] = m, inverse[row] = inv;
}

extern "C" __global__ void layer_norm_dx(const T* g, const T* x, const float* mean, const float* inverse, const T* gain,
                                         T* dx, Index rows) {
  Index row = warp_index();
  if (row >= rows) return;
  Row t, h, a;
  t.load(g + row * N), h.load(x + row * N), a.load(gain);
  float m = mean[row], inv = inverse[row], sum_t = 0, sum_th = 0;
  Row::each([&](int i, int) {
    h.v[i] = (h.v[i] - m) * inv, t.v[i] *= a.v[i];
    sum_t += t.v[i], sum_th += t.v[i] * h.v[i];
  });
  sum_t = warp_sum(sum_t) / N, sum_th = warp_sum(sum_th) / N;
  Row::each([&](int i, int) { t.v[i] = (t.v[i] - sum_t - h.v[i] * sum_th) * inv; });
  t.store(dx + row * N);
}

extern "C" __global__ void rms_norm(const T* x, const T* gain, T* y, float* inverse, Index rows, float eps) {
  Index row = warp_index();
  if (row >= rows) return;
  Row h, a;
  h.load(x + row * N), a.load(gain);
  float squares = 0;
  Row::each([&](int i, int) { squares += h.v[i] * h.v[i]; });
  float inv = 1 / sqrtf(warp_sum(squares) / N + eps);
  Row::each([&](int i, int) { h.v[i] *= inv * a.v[i]; });
  h.store(y + row * N);
  if (threadIdx.x % 32 == 0) inverse[row] = inv;
}

extern "C" __global__ void rms_norm_dx(const T* g, const T* x, const float* inverse, const T* gain, T* dx, Index rows) {
  Index row = warp_index();
  if (row >= rows) return;
  Row t, h, a;
  t.load(g + row * N), h.load(x + row * N), a.load(gain);
  float inv = inverse[row], sum_th = 0;
  Row::each([&](int i, int) { h.v[i] *= inv, t.v[i] *= a.v[i], sum_th += t.v[i] * h.v[i]; });
  sum_th = warp_sum(sum_th) / N;
  Row::each([&](int i, int) { t.v[i] = (t.v[i] - h.v[i] * sum_th) * inv; });
  t.store(dx + row * N);
}

// layer_norm_dx with sums over rows on the way: each block writes a row of part_gain, of g h, and one of part_bias, of g.
extern "C" __global__ __launch_bounds__(256, 2) void layer_norm_back(const T* g, const T* x, const float* mean,
                                                                     const float* inverse, const T* gain,
                                                                     const T* beside, T* dx, float* part_gain,
                                                                     float* part_bias, Index rows) {
  extern __shared__ float shared[];  // the gain, then (warps, N) sums
  for (int c = threadIdx.x; c < N; c += blockDim.x) shared[c] = number(gain[c]);
  __syncthreads();
  Row dgain, dbias;
  Row::each([&](int i, int) { dgain.v[i] = dbias.v[i] = 0; });
  for (Index row = warp_index(); row < rows; row += gridDim.x * (blockDim.x / 32)) {
    Row h, t;
    h.load(x + row * N), t.load(g + row * N);
    float m = mean[row], inv = inverse[row], sum_t = 0, sum_th = 0;
    Row::each([&](int i, int c) {
      float hi = (h.v[i] - m) * inv, ti = t.v[i];
      dgain.v[i] += ti * hi, dbias.v[i] += ti;
      ti *= shared[c], sum_t += ti, sum_th += ti * hi;
    });
    sum_t = warp_sum(sum_t) / N, sum_th = warp_sum(sum_th) / N;
    asm volatile("" ::: "memory");  // read the row again, from the cache: registers are dearer
    h.load(x + row * N), t.load(g + row * N);
    Row::each([&](int i, int c) { t.v[i] = (t.v[i] * shared[c] - sum_t - (h.v[i] - m) * inv * sum_th) * inv; });
    t.store(dx + row * N, beside ? beside + row * N : 0);
  }
  int warp = threadIdx.x / 32;
  for (int which = 0; which < 2; which++) {
    __syncthreads();
    Row::each([&](int i, int c) { shared[warp * N + c] = which ? dbias.v[i] : dgain.v[i]; });
    __syncthreads();
    for (int c = threadIdx.x; c < N; c += blockDim.x) {
      float sum = 0;
      for (int i = 0; i < blockDim.x / 32; i++) sum += shared[i * N + c];
      (which ? part_bias : part_gain)[blockIdx.x * (Index)N + c] = sum;
    }
  }
}

extern "C" __global__ void embedding(const T* table, const int* ids, T* y, Index rows, int num_rows) {
  Index row = warp_index();
  if (row >= rows) return;
  int id = ids[row];
  Row r;
  if (id >= 0 && id < num_rows)
    r.load(table + (Index)id * N);
  else
    Row::each([&](int i, int) { r.v[i] = __int_as_float(0x7fffffff); });
  r.store(y + row * N);
}

// The first position with an id adds up all positions with that id, in their order, onto dtable: no sort, no atomics.
extern "C" __global__ void embedding_dtable(const int* ids, const T* g, float* dtable, Index rows, int num_rows) {
  Index row = warp_index();
  if (row >= rows) return;
  int id = ids[row], lane = threadIdx.x % 32;
  if (id < 0 || id >= num_rows) return;
  auto four = [&](Index j, int q, Index end) {  // which of 4 neighbours below `end` are the same, as bits
    Index at = j + 128 * q + 4 * lane;
    if (at + 4 <= end) {
      int4 x = *(const int4*)(ids + at);
      return (unsigned)(x.x == id) | (x.y == id) << 1 | (x.z == id) << 2 | (x.w == id) << 3;
    }
    unsigned bits = 0;
    for (int k = 0; k < 4 && at + k < end; k++) bits |= (ids[at + k] == id) << k;
    return bits;
  };
  for (Index j = 0; j < row; j += 512) {
    unsigned same = 0;
#pragma unroll
    for (int q = 0; q < 4; q++) same |= four(j, q, row);
    if (__any_sync(~0u, same)) return;
  }
  Row sum, other;
  sum.load(g + row * N);
  for (Index j = row / 512 * 512; j < rows; j += 512) {
    unsigned same[4], any = 0;
#pragma unroll
    for (int q = 0; q < 4; q++) any |= same[q] = four(j, q, rows);
    if (!__any_sync(~0u, any)) continue;
    for (int q = 0; q < 4; q++)
      for (unsigned lanes = __ballot_sync(~0u, same[q]); lanes; lanes &= lanes - 1) {
        int from = __ffs(lanes) - 1;
        unsigned bits = __shfl_sync(~0u, same[q], from);
        for (Index at = j + 128 * q + 4 * from; bits; bits >>= 1, at++)
          if (bits & 1 && at > row) {
            other.load(g + at * N);
            Row::each([&](int i, int) { sum.v[i] += other.v[i]; });
          }
      }
  }
  float* out = dtable + (Index)id * N;
  Row::each([&](int i, int c) { out[c] += sum.v[i]; });
}

#else  // ---- any shape ----------------------------------------------------------------------------------------

// Columns are added up in two steps: part[y, c] over the rows of y, 8 warps sharing them, then over y, in its order, by
// the block that is the last to be done with these columns. `done` is 0 before and after.
template <int Q, class X, class Load, class Open>
__device__ inline void add_up_columns(Load load, Open open, float* part, unsigned* done, float* out, bool add,
                                      Index rows, Index n) {
  __shared__ float sums[8][256];
  __shared__ bool is_last;
  Index c = blockIdx.x * 256 + threadIdx.x % 32 * 8, step = gridDim.y * 8;
  int warp = threadIdx.x / 32;
  V8 a = {};
  if (c < n)
    for (Index r = blockIdx.y * 8 + warp; r < rows; r += Q * step) {
      X x[Q];  // loads under way
#pragma unroll
      for (int q = 0; q < Q; q++)
        if (r + q * step < rows) x[q] = load(r + q * step, c);
#pragma unroll
      for (int q = 0; q < Q; q++)
        if (r + q * step < rows) {
          V8 v = open(x[q]);
#pragma unroll
          for (int j = 0; j < 8; j++) a.v[j] += v.v[j];
        }
    }
  store_vector(&sums[warp][threadIdx.x % 32 * 8], a);
  __syncthreads();
  float total = 0;
  for (int i = 0; i < 8; i++) total += sums[i][threadIdx.x];
  Index own = blockIdx.x * 256 + threadIdx.x;
  if (own < n) part[blockIdx.y * n + own] = total;
  __threadfence();
  __syncthreads();
  if (!threadIdx.x) is_last = atomicAdd(done + blockIdx.x, 1) == gridDim.y - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (!threadIdx.x) done[blockIdx.x] = 0;
  if (own >= n) return;
  total = 0;
  for (unsigned y = 0; y < gridDim.y; y += 16) {
    float x[16];
#pragma unroll
    for (int q = 0; q < 16; q++) x[q] = y + q < gridDim.y ? __ldcg(part + (y + q) * n + own) : 0;
#pragma unroll
    for (int q = 0; q < 16; q++) total += x[q];
  }
  out[own] = add ? out[own] + total : total;
}
extern "C" __global__ __launch_bounds__(256, sizeof(T) == 2 ? 5 : 3) void column_sum(const T* g, Index stride,
                                                                                      float* part, unsigned* done,
                                                                                      float* out, bool add, Index rows,
                                                                                      Index n) {
#if VECTORS
  if (n % 8 == 0)
    return add_up_columns<4, Packed>([&](Index r, Index c) { return load_packed(g + r * stride + c); },
                                  [](const Packed& x) { return unpack(x); }, part, done, out, add, rows, n);
#endif
  add_up_columns<sizeof(T) == 2 ? 1 : 4, V8>([&](Index r, Index c) { return load8(g + r * stride, c, n, VECTORS); },
                     [](const V8& x) { return x; }, part, done, out, add, rows, n);
}
extern "C" __global__ void norm_dgain(const T* g, const T* x, const float* mean, const float* inverse, float* part,
                                      unsigned* done, float* out, bool add, Index rows, Index n) {
  add_up_columns<4, V8>(
      [&](Index r, Index c) {
        V8 a = load8(g + r * n, c, n, VECTORS), h = load8(x + r * n, c, n, VECTORS);
        float m = mean ? mean[r] : 0, inv = inverse[r];
#pragma unroll
        for (int j = 0; j < 8; j++) a.v[j] *= (h.v[j] - m) * inv;
        return a;
      },
      [](const V8& x) { return x; }, part, done, out, add, rows, n);
}
extern "C" __global__ void sum_parts(const float* part, float* out, Index rows, Index n, bool add) {
  __shared__ float sums[32][33];
  Index c = blockIdx.x * 32 + threadIdx.x;
  float total = 0;
  if (c < n)
    for (Index r = threadIdx.y; r < rows; r += 32) total += part[r * n + c];
  sums[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  total = warp_sum(sums[threadIdx.x][threadIdx.y]);
  c = blockIdx.x * 32 + threadIdx.y;
  if (threadIdx.x == 0 && c < n) out[c] = add ? out[c] + total : total;
}

// Elementwise: the first threads take 8 numbers each, the others one of the rest.
template <class F>
__device__ inline void elementwise(Index n, F f) {
  Index i = thread_index(), vectors = VECTORS ? n / 8 : 0;
  if (i < vectors)
    f(i * 8, i * 8 + 8);
  else if (i - vectors < n - 8 * vectors)
    f(7 * vectors + i, 7 * vectors + i + 1);
}
// z = x + y, where y is as long as x or comes again and again.
extern "C" __global__ void add(const T* x, const T* y, T* z, Index period, Index n) {
  elementwise(n, [&](Index i, Index end) {
    Index at = period < n ? i % period : i;
    V8 a = load8(x, i, end, VECTORS), b = load8(y, at, at + end - i, VECTORS);
    for (int j = 0; j < 8; j++) a.v[j] += b.v[j];
    store8(z, i, end, VECTORS, a);
  });
}
extern "C" __global__ void multiply(const T* x, const T* y, T* z, Index n) {
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(x, i, end, VECTORS), b = load8(y, i, end, VECTORS);
    for (int j = 0; j < 8; j++) a.v[j] *= b.v[j];
    store8(z, i, end, VECTORS, a);
  });
}
extern "C" __global__ void select(const T* x, const bool* keep, float scale, T* y, Index n) {
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(x, i, end, VECTORS);
    for (int j = 0; j < 8 && i + j < end; j++) a.v[j] = keep[i + j] ? a.v[j] * scale : 0;
    store8(y, i, end, VECTORS, a);
  });
}
// max(x, 0), and where x > 0; a nan stays one.
extern "C" __global__ void relu(const T* x, T* y, bool* positive, Index n) {
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(x, i, end, VECTORS);
    __align__(8) bool above[8];
#pragma unroll
    for (int j = 0; j < 8; j++) above[j] = a.v[j] > 0, a.v[j] = a.v[j] <= 0 ? 0 : a.v[j];
    store8(y, i, end, VECTORS, a);
    if (VECTORS && i + 8 <= end) *(uint2*)(positive + i) = *(uint2*)above;
    else
      for (int j = 0; j < 8 && i + j < end; j++) positive[i + j] = above[j];
  });
}
__device__ inline float logistic(float x) { return 1 / (1 + __expf(-x)); }
extern "C" __global__ void sigmoid(const T* x, T* y, Index n) {
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(x, i, end, VECTORS);
    for (int j = 0; j < 8; j++) a.v[j] = logistic(a.v[j]);
    store8(y, i, end, VECTORS, a);
  });
}
extern "C" __global__ void sigmoid_dx(const T* g, const T* y, T* dx, Index n) {
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(g, i, end, VECTORS), b = load8(y, i, end, VECTORS);
    for (int j = 0; j < 8; j++) a.v[j] *= b.v[j] * (1 - b.v[j]);
    store8(dx, i, end, VECTORS, a);
  });
}
// From -100 down SiLU and its derivative are 0, from 100 up x and 1: no inf times 0. A nan stays one.
__device__ inline float silu_at(float x, float& d) {
  float outer = x < -100 ? -100 : x, inner = outer > 100 ? 100 : outer, s = logistic(inner);
  d = s + inner * s * (1 - s);
  return outer * s;
}
extern "C" __global__ void silu(const T* x, T* y, Index n) {
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(x, i, end, VECTORS);
    float d;
    for (int j = 0; j < 8; j++) a.v[j] = silu_at(a.v[j], d);
    store8(y, i, end, VECTORS, a);
  });
}
extern "C" __global__ void silu_dx(const T* g, const T* x, T* dx, Index n) {
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(x, i, end, VECTORS), b = load8(g, i, end, VECTORS);
    for (int j = 0; j < 8; j++) {
      float d;
      silu_at(a.v[j], d);
      b.v[j] *= d;
    }
    store8(dx, i, end, VECTORS, b);
  });
}
// From 40 on, on both sides, GELU is x or 0 and its derivative 1 or 0: no inf times 0. A nan stays one.
__device__ inline float from_below(float x) { return x < -40 ? -40 : x; }
__device__ inline float gelu_tanh(float x, float& d) {
  float a = 1.5957691216057308f, b = a * 0.044715f, outer = from_below(x), inner = outer > 40 ? 40 : outer;
  float s = 1 / (1 + __expf(-inner * (a + b * inner * inner)));
  d = s + inner * s * (1 - s) * (a + 3 * b * inner * inner);
  return outer * s;
}
__device__ inline float gelu_exact(float x, float& d) {
  float outer = from_below(x), inner = outer > 40 ? 40 : outer, p = 0.5f * erfcf(-inner * 0.7071067811865476f);
  d = p + inner * 0.3989422804014327f * __expf(-0.5f * inner * inner);
  return outer * p;
}
extern "C" __global__ void gelu(const T* x, T* y, bool exact, Index n) {
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(x, i, end, VECTORS);
    float d;
    for (int j = 0; j < 8; j++) a.v[j] = exact ? gelu_exact(a.v[j], d) : gelu_tanh(a.v[j], d);
    store8(y, i, end, VECTORS, a);
  });
}
extern "C" __global__ void gelu_dx(const T* g, const T* x, T* dx, bool exact, Index n) {
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(x, i, end, VECTORS), b = load8(g, i, end, VECTORS);
    for (int j = 0; j < 8; j++) {
      float d;
      exact ? gelu_exact(a.v[j], d) : gelu_tanh(a.v[j], d);
      b.v[j] *= d;
    }
    store8(dx, i, end, VECTORS, b);
  });
}
// To type T and back, scaled by a power of two that brings the largest of x to [1, 2): none, where there are no parts.
extern "C" __global__ void largest(const float* x, float* part, Index n) {
  float top = 0;
  for (Index i = thread_index() * 8; i < n; i += gridDim.x * (Index)blockDim.x * 8) {
    V8 a = load8(x, i, n, VECTORS);
    for (int j = 0; j < 8; j++) top = fmaxf(top, fabsf(a.v[j]));
  }
  top = block_max(top);
  if (!threadIdx.x) part[blockIdx.x] = top;
}
extern "C" __global__ void narrow(const float* x, T* y, const float* part, int parts, float* unscale, Index n) {
  float top = 0, scale = 1;
  for (int i = threadIdx.x; i < parts; i += blockDim.x) top = fmaxf(top, part[i]);
  if (parts) {
    int exponent = (int)(__float_as_uint(block_max(top)) >> 23) - 127;  // 128 of inf
    if (exponent > -127 && exponent < 127) scale = __uint_as_float((unsigned)(127 - exponent) << 23);
    if (!thread_index()) *unscale = 1 / scale;
  }
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(x, i, end, VECTORS);
    for (int j = 0; j < 8; j++) a.v[j] *= scale;
    store8(y, i, end, VECTORS, a);
  });
}
extern "C" __global__ void widen(const T* x, float* y, const float* unscale, Index n) {
  float factor = unscale ? *unscale : 1;
  elementwise(n, [&](Index i, Index end) {
    V8 a = load8(x, i, end, VECTORS);
    for (int j = 0; j < 8; j++) a.v[j] *= factor;
    store8(y, i, end, VECTORS, a);
  });
}
extern "C" __global__ void one_hot(const int* ids, T* y, Index rows, int num_rows, Index stride) {
  Index i = thread_index();
  if (i < rows * stride) put(y + i, ids[i / stride] == i % stride ? 1 : 0);
}

// One block a row, two passes; the second runs backwards and finds most of the row in the L2 cache, where neither what
// it has read nor what it writes is left: a sixth less time at 50,304 classes.
extern "C" __global__ void cross_entropy(const T* logits, Index stride, const int* targets, float* losses, T* dlogits,
                                         Index dstride, int n, float smoothing, float weight) {
  const T* row = logits + blockIdx.x * stride;
  T* drow = dlogits + blockIdx.x * dstride;
  int target = targets[blockIdx.x], step = blockDim.x * 8, first = threadIdx.x * 8;
  bool counts = target >= 0;
  ExpSum sum;
  float plain = 0;
  if (counts)
    for (int c = first; c < n; c += step) {
      V8 x = load8(row, c, n, VECTORS);
      sum.add(x, c, n, 1);
      for (int j = 0; j < 8; j++) plain += c + j < n ? x.v[j] : 0;
    }
  float highest, total = sum.of_block(highest);
  if (smoothing) plain = block_sum(plain);
  float log_sum = highest + __logf(total), even = smoothing / n;
  if (!threadIdx.x) {
    float loss = counts ? log_sum - (1 - smoothing) * (target < n ? number(row[target]) : 0) : 0;
    if (counts && smoothing) loss -= even * plain;
    losses[blockIdx.x] = target < n ? loss : __int_as_float(0x7fffffff);
  }
  for (int c = first < n ? first + (n - 1 - first) / step * step : -1; c >= 0; c -= step) {
    V8 x = load8<true>(row, c, n, VECTORS);
    for (int j = 0; j < 8; j++) {
      float q = even + (c + j == target ? 1 - smoothing : 0);
      x.v[j] = !counts ? 0 : target < n ? (__expf(x.v[j] - log_sum) - q) * weight : __int_as_float(0x7fffffff);
    }
    store8<true>(drow, c, n, VECTORS, x);
  }
}
// Softmax of scale * x, or its logarithm, a block a row; y may be x. In attention row r sees first + r % period + 1
// numbers, or all if first is negative, and of these what `seen` says; what it does not see gets 0.
extern "C" __global__ void softmax(const T* x, T* y, Index n, float scale, bool logarithm, bool attention, Index first,
                                   Index period, const bool* seen) {
  Index row = blockIdx.x, end = first < 0 ? n : first + row % period + 1;
  x += row * n, y += row * n;
  if (seen) seen += row * n;
  if (end > n) end = n;
  const float infinity = __int_as_float(0x7f800000);
  Index start = threadIdx.x * 8, step = blockDim.x * 8;
  auto load = [&](Index c) {
    V8 v = load8(x, c, n, VECTORS);
    if (seen)
      for (int j = 0; j < 8 && c + j < end; j++)
        if (!seen[c + j]) v.v[j] = -infinity;
    return v;
  };
  ExpSum sum;
  for (Index c = start; c < end; c += step) sum.add(load(c), c, end, scale);
  float top, total = sum.of_block(top), log_total = __logf(total);
  float inverse = attention && total == 0 ? 0 : 1 / total;  // a query that sees nothing
  for (Index c = start; c < n; c += step) {
    V8 v = {};
    if (c < end) v = load(c);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      float z = v.v[j] * scale - top;
      v.v[j] = c + j >= end ? 0 : logarithm ? z - log_total : __expf(z) * inverse;
    }
    store8(y, c, n, VECTORS, v);
  }
}
// scale * y (g - sum(g y)), or of the logarithm g - exp(y) sum(g); dx may be g.
extern "C" __global__ void softmax_dx(const T* g, const T* y, T* dx, Index n, float scale, bool logarithm) {
  Index row = blockIdx.x;
  g += row * n, y += row * n, dx += row * n;
  Index start = threadIdx.x * 8, step = blockDim.x * 8;
  float total = 0;
  for (Index c = start; c < n; c += step) {
    V8 a = load8(g, c, n, VECTORS), b = load8(y, c, n, VECTORS);
#pragma unroll
    for (int j = 0; j < 8; j++) total += logarithm ? a.v[j] : a.v[j] * b.v[j];
  }
  total = block_sum(total);
  for (Index c = start; c < n; c += step) {
    V8 a = load8(g, c, n, VECTORS), b = load8(y, c, n, VECTORS);
#pragma unroll
    for (int j = 0; j < 8; j++)
      a.v[j] = logarithm ? a.v[j] - __expf(b.v[j]) * total : scale * b.v[j] * (a.v[j] - total);
    store8(dx, c, n, VECTORS, a);
  }
}
// x *= factor in place; a factor of 1, which a loss nearly always has, costs nothing.
extern "C" __global__ void scale_by(T* x, const float* factor, Index n) {
  float f = *factor;
  if (f == 1) return;
  for (Index i = thread_index() * 8; i < n; i += gridDim.x * (Index)blockDim.x * 8) {
    V8 a = load8(x, i, n, VECTORS);
    for (int j = 0; j < 8; j++) a.v[j] *= f;
    store8(x, i, n, VECTORS, a);
  }
}

// ---- the optimizer: flat float32 arrays, and the copy of type T that ops see -----------------------------------

extern "C" __global__ void square_sum(const float* g, double* part, Index n) {
  double total = 0;
  for (Index i = thread_index() * 4; i < n; i += gridDim.x * (Index)blockDim.x * 4) {
    if (VECTORS && i + 4 <= n) {
      float4 a = *(const float4*)(g + i);
      total += (double)a.x * a.x + (double)a.y * a.y + (double)a.z * a.z + (double)a.w * a.w;
    } else
      for (Index j = i; j < n && j < i + 4; j++) total += (double)g[j] * g[j];
  }
  total = block_sum(total);
  if (!threadIdx.x) part[blockIdx.x] = total;
}
// Of every EXACT_BLOCK numbers three that add up to the sum of their squares. A square of 24 bits is a double without
// rounding; `cut` takes off its highest bits, so few that their sum is exact, in any order; then the next ones.
const int EXACT_BLOCK = 1 << 15, CARRY_BITS = 16;
extern "C" __global__ __launch_bounds__(1024) void exact_square_sums(const float* g, double* part, Index n) {
  V8 x[EXACT_BLOCK / 8 / 1024];
  unsigned top = 0;
  int k = 0;
  for (V8& v : x) {
    v = load8(g, blockIdx.x * (Index)EXACT_BLOCK + 8 * (k++ * 1024 + threadIdx.x), n, VECTORS);
    for (float y : v.v) top = Most()(top, magnitude(y));
  }
  double root = __uint_as_float(block_join(top, 0u, Most())), largest = root * root, sums[3] = {};
  if (0 < largest && largest < __longlong_as_double(0x7ff0000000000000)) {
    int exponent;
    frexp(largest, &exponent);
    double cut = ldexp(1.0, exponent + CARRY_BITS), next_cut = ldexp(cut, CARRY_BITS - 53);
    for (const V8& v : x)
      for (float y : v.v) {
        double square = (double)y * y, high = square + cut - cut, left = square - high;
        double low = left + next_cut - next_cut;
        sums[0] += high, sums[1] += low, sums[2] += left - low;
      }
    for (double& sum : sums) sum = block_sum(sum);
  } else
    sums[0] = largest;
  for (int i = 0; i < 3 && !threadIdx.x; i++) part[3 * blockIdx.x + i] = sums[i];
}

// What a step of AdamW needs beside arrays, on the device, so that a captured step may change it.
struct Scalars {
  float lr, before;                            // the host writes these: steps that were taken before `done` counts
  float rate, eps, shrink, clip, norm, taken;  // `prepare` makes these of them
  float done;                                  // steps that were taken
};
// Of float16: gradients are `factor` times what they should be. A power of two.
struct LossScale {
  float factor, good, skipped, in_a_row;  // good: steps taken since it last changed; in_a_row: the last ones skipped
  __device__ void follow(bool taken, float growth_steps, float most) {
    in_a_row = taken ? 0 : in_a_row + 1;
    skipped += !taken;
    good = taken ? good + 1 : 0;
    if (!taken) factor = fmaxf(factor / 2, 1);
    else if (good >= growth_steps) factor = fminf(factor * 2, most), good = 0;
  }
};
extern "C" __global__ void prepare(const double* part, Index parts, Scalars* s, LossScale* scale, float growth_steps,
                                   float most, float beta1, float beta2, float eps, float decay, float max_norm) {
  double total = 0;
  for (Index i = threadIdx.x; i < parts; i += blockDim.x) total += part[i];
  total = block_sum(total);
  if (threadIdx.x) return;
  double t = (double)s->before + s->done + 1, c1 = 1 - pow((double)beta1, t), c2 = sqrt(1 - pow((double)beta2, t));
  double factor = scale ? scale->factor : 1, norm = sqrt(total) / factor;
  s->rate = s->lr / c1 * c2, s->eps = eps * c2, s->shrink = s->lr * decay, s->norm = norm;
  bool taken = norm < __longlong_as_double(0x7ff0000000000000);  // else nothing changes
  s->taken = taken, s->done += taken;
  s->clip = (norm > max_norm ? max_norm / norm : 1) / factor;
  if (scale) scale->follow(taken, growth_steps, most);
}
// Run i, from starts[i] to starts[i + 1], is of a kind: 0 plain, 1 with weight decay, 2 frozen.
extern "C" __global__ void adamw(float* w, const float* g, float* m, float* v, T* copy, const Scalars* s,
                                 const Index* starts, const unsigned char* kinds, int runs, float beta1, float beta2,
                                 bool follows, Index n) {
  Index i = thread_index() * 4;
  if (i >= n || !s->taken) return;
  int run = 0;
  for (int high = runs; high - run > 1;) {
    int middle = (run + high) / 2;
    if (starts[middle] <= i) run = middle;
    else high = middle;
  }
  Index last = i + 4 < n ? i + 4 : n;
  float rate = s->rate, eps = s->eps, shrink = s->shrink, clip = s->clip;
  bool whole = VECTORS && i + 4 <= n;
  float W[4], G[4], M[4], V[4];
  if (whole) {
    *(float4*)W = *(float4*)(w + i), *(float4*)G = *(float4*)(g + i);
    *(float4*)M = *(float4*)(m + i), *(float4*)V = *(float4*)(v + i);
  } else
    for (int j = 0; i + j < last; j++) W[j] = w[i + j], G[j] = g[i + j], M[j] = m[i + j], V[j] = v[i + j];
#if defined(BF16) || defined(F16)
  if (follows) {  // what somebody assigned to the copy
    uint2 u = whole ? *(uint2*)(copy + i) : uint2();
    T C[4] = {(T)u.x, (T)(u.x >> 16), (T)u.y, (T)(u.y >> 16)};
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (i + j >= last) break;
      if (!whole) C[j] = copy[i + j];
      if (C[j] != (T)pack(W[j], 0)) W[j] = wide(C[j]);
    }
  }
#endif
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if (i + j >= last) break;
    while (run + 1 < runs && starts[run + 1] <= i + j) run++;
    if (kinds[run] == 2) continue;  // frozen
    float d = G[j] * clip;
    M[j] += (1 - beta1) * (d - M[j]);
    V[j] += (1 - beta2) * (d * d - V[j]);
    W[j] = W[j] * (kinds[run] ? 1 - shrink : 1) - rate * __fdividef(M[j], sqrtf(V[j]) + eps);
  }
  if (whole) {
    *(float4*)(w + i) = *(float4*)W, *(float4*)(m + i) = *(float4*)M, *(float4*)(v + i) = *(float4*)V;
#if defined(BF16) || defined(F16)
    if (copy) *(uint2*)(copy + i) = make_uint2(pack(W[0], W[1]), pack(W[2], W[3]));
#endif
  } else
    for (int j = 0; i + j < last; j++) {
      w[i + j] = W[j], m[i + j] = M[j], v[i + j] = V[j];
      if (copy) put(copy + i + j, W[j]);
    }
}

// ---- numbers in few bits, in blocks of n: a warp a block, its threads 8 neighbours each -------------------------
// n is a multiple of 16 and at most 256. quantization/reference.py has what the codes say.

// A float of 4 bits, times 2, and its code without the sign.
__device__ inline int magnitude_of(int code) { return code < 4 ? code : code < 6 ? 2 * (code - 2) : 4 * (code - 4); }
__device__ inline int code_of(int size) { return size < 4 ? size : size < 8 ? size / 2 + 2 : size / 4 + 4; }

// x + kept in few bits: what these say goes into x, which ends at `end`, and what they do not into `kept`.
extern "C" __global__ void quantize(float* x, float* kept, unsigned* codes, float* scales, int n, int bits,
                                    bool is_float, float largest, Index blocks, Index end) {
  Index block = warp_index();
  if (block >= blocks) return;
  int place = 8 * (threadIdx.x % 32), bytes = n * bits / 8;
  Index first = block * n + place;
  V8 lost = {}, said = {};
  unsigned top = 0;
  if (place < n) lost = load8(kept, first, blocks * n, VECTORS), said = load8(x, first, end, VECTORS);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    if (first + j < end) lost.v[j] += said.v[j];
    top = Most()(top, magnitude(lost.v[j]));
  }
  const float infinity = __int_as_float(0x7f800000), nan = __int_as_float(0x7fffffff);
  float scale = __uint_as_float(warp_join(top, Most())) / largest, step = scale > 0 ? scale : 1;
  bool is_broken = !(scale < infinity);
  unsigned words[2] = {};
#pragma unroll
  for (int j = 0; j < 8; j++) {
    float number = lost.v[j] / step, size = is_float ? fabsf(number) : 0;
    float apart = size < 4 ? 1 : size < 8 ? 2 : 4, finer = size < 4 ? 1 : size < 8 ? .5f : .25f;  // one over the other
    number = is_broken ? 0 : fminf(fmaxf(rintf(number * finer) * apart, -largest), largest);
    int whole = number, code = !is_float ? whole : whole < 0 ? code_of(-whole) + 8 : code_of(whole);
    words[j / 4] |= (code & ((1 << bits) - 1)) << 8 * (j % 4);
    said.v[j] = is_broken ? nan : __fmul_rn(number, step);
    lost.v[j] = is_broken ? 0 : __fsub_rn(lost.v[j], said.v[j]);
  }
  if (threadIdx.x % 32 == 0) scales[block] = is_broken ? nan : scale;
  if (place < n) store8(kept, first, blocks * n, VECTORS, lost), store8(x, first, end, VECTORS, said);
  for (int w = 0; w < 2; w++) {
    if (bits == 4) words[w] |= __shfl_down_sync(~0u, words[w], n / 16) << 4;  // the other half lies on top
    if (place < bytes) codes[(block * bytes + place) / 4 + w] = words[w];
  }
}
// The numbers that codes say, written into `out`, which ends at `end`, or added.
extern "C" __global__ void add_dequantized(const unsigned* codes, const float* scales, float* out, int n, int bits,
                                           bool is_float, bool add, Index blocks, Index end) {
  Index block = warp_index();
  int place = 8 * (threadIdx.x % 32), bytes = n * bits / 8, up = place / bytes * bits;
  Index first = block * n + place;
  if (block >= blocks || place >= n) return;
  codes += (block * bytes + place % bytes) / 4;
  float scale = scales[block];
  V8 y = {};
  if (add) y = load8(out, first, end, VECTORS);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    int code = (int)(codes[j / 4] << (32 - bits - up - 8 * (j % 4))) >> (32 - bits);  // with its sign
    int number = !is_float ? code : code < 0 ? -magnitude_of(code & 7) : magnitude_of(code);
    float value = __fmul_rn(number, scale);
    y.v[j] = add ? y.v[j] + value : value;
  }
  store8(out, first, end, VECTORS, y);
}
#endif
