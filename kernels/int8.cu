// Products with int8 weights, W = diag(s) q: fp32 activations, fp32 sums, and no fp32 copy of W. The reference is
// int8_y and int8_dx in rrd/ops/reference.py.
//
//     y = x W^T = (x q^T) s        dx = dy W = (dy s) q
//
// Shapes   q [out, in] int8 and s [out] fp32, contiguous; x, dx [M, in] and dy, y [M, out] fp32 with rows ldx, lddx,
//          lddy, ldy elements apart. Any sizes; rows of q are read 4 bytes at a time where in is a multiple of 4.
// Writes   y and dx are overwritten where add is 0 and added to where it is 1; elements between the rows stay.
// Null     s of rrd_int8_limbs (ones).
// Exact    An int8 is exact in fp32, so only products and sums are rounded, as in any fp32 product. The dp4a path
//          rounds x to 2^-23 of its row's largest element; its sums are integers, and exact up to 130,000 terms.
//          No atomics: the same input gives the same bits.
//
// Tiles of 128 x 64, 16 terms at a time; a thread has 8 x 8 sums. While one half of shared memory is multiplied, the
// next terms come into registers and then into the other half: one barrier a step.
//
// dp4a (sm_61 and newer) multiplies 4 int8 pairs at once. An int8 alone is too coarse for activations, so x becomes
// three of them, x = unit (65536 l0 + 256 l1 + l2), and the product three integer products with the same q.

#ifndef __CUDACC__
#include "host.h"
#elif __CUDA_ARCH__ >= 610
#define RRD_DP4A 1
#endif

constexpr int TM = 128, TN = 64, TK = 16;   // a tile: rows, columns, terms at a time
constexpr int THREADS = 128;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
constexpr int BLOCKS = 3;                   // at once on a multiprocessor: 168 registers a thread, as many as are used
#else
constexpr int BLOCKS = 2;                   // 168 would spill
#endif
constexpr int GAP = 4;                      // between rows of shared memory: writes down a column meet fewer banks

__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }

// Bytes [column, column + 4) of a row of q as one word, zeros behind its end.
__device__ __forceinline__ int word_of(const signed char* row, int column, int width) {
  if (width % 4 == 0) return column < width ? *reinterpret_cast<const int*>(row + column) : 0;
  int word = 0;
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (column + i < width) word |= (row[column + i] & 0xff) << 8 * i;
  return word;
}
__device__ __forceinline__ float byte_of(int word, int i) { return (float)(signed char)(word >> 8 * i); }

// ---- fp32 ------------------------------------------------------------------------------------------------------------

struct Tiles {
  float a[TK][TM + GAP], b[TK][TN + GAP];
};

// What a thread brings of the next tiles: 16 elements of the activations, 2 words of q.
struct Coming {
  float a[TM * TK / THREADS];
  int b[TN * TK / 4 / THREADS];
};

// The terms [k0, k0 + TK) of A [M, K], times s where there is one, and of q: [N, K] for y, [K, N] for dx.
template <bool DX>
__device__ __forceinline__ void fetch(Coming& c, const float* A, const signed char* q, const float* s, int M, int N,
                                      int K, long long lda, int k0) {
  const int tid = threadIdx.x, k = k0 + tid % TK;
  const float scale = s && k < K ? s[k] : 1.f;
#pragma unroll
  for (int i = 0; i < TM * TK / THREADS; i++) {
    const int m = blockIdx.x * TM + tid / TK + i * (THREADS / TK);
    c.a[i] = m < M && k < K ? A[m * lda + k] * scale : 0.f;
  }
#pragma unroll
  for (int i = 0; i < TN * TK / 4 / THREADS; i++) {
    const int w = tid + i * THREADS;
    if (DX) {
      const int row = k0 + w / (TN / 4), column = blockIdx.y * TN + w % (TN / 4) * 4;
      c.b[i] = row < K ? word_of(q + (long long)row * N, column, N) : 0;
    } else {
      const int row = blockIdx.y * TN + w / (TK / 4), column = k0 + w % (TK / 4) * 4;
      c.b[i] = row < N ? word_of(q + (long long)row * K, column, K) : 0;
    }
  }
}

template <bool DX> __device__ __forceinline__ void put(Tiles& t, const Coming& c) {
  const int tid = threadIdx.x;
#pragma unroll
  for (int i = 0; i < TM * TK / THREADS; i++) t.a[tid % TK][tid / TK + i * (THREADS / TK)] = c.a[i];
#pragma unroll
  for (int i = 0; i < TN * TK / 4 / THREADS; i++) {
    const int w = tid + i * THREADS;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (DX) t.b[w / (TN / 4)][w % (TN / 4) * 4 + j] = byte_of(c.b[i], j);
      else t.b[w % (TK / 4) * 4 + j][w / (TK / 4)] = byte_of(c.b[i], j);
    }
  }
}

// C [M, N] = A q^T, times the columns' scale at the end, or (A s) q.
template <bool DX>
__device__ __forceinline__ void product(Tiles* tiles, const float* A, const signed char* q, const float* s, float* C,
                                        int M, int N, int K, long long lda, long long ldc, int add) {
  const int tx = threadIdx.x % 8 * 4, ty = threadIdx.x / 8 * 4;  // rows ty.. and TM/2 + ty.., columns likewise
  float sum[8][8] = {};
  Coming next;
  fetch<DX>(next, A, q, DX ? s : nullptr, M, N, K, lda, 0);
  int now = 0;
  put<DX>(tiles[now], next);
  __syncthreads();
  for (int k0 = 0; k0 < K; k0 += TK) {
    const bool more = k0 + TK < K;
    if (more) fetch<DX>(next, A, q, DX ? s : nullptr, M, N, K, lda, k0 + TK);
    const Tiles& t = tiles[now];
#pragma unroll
    for (int k = 0; k < TK; k++) {
      const float4 a0 = load4(t.a[k] + ty), a1 = load4(t.a[k] + TM / 2 + ty);
      const float4 b0 = load4(t.b[k] + tx), b1 = load4(t.b[k] + TN / 2 + tx);
      const float a[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
      const float b[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
#pragma unroll
      for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) sum[i][j] += a[i] * b[j];
    }
    if (more) {
      now ^= 1;  // nobody reads that half any more: all have passed the barrier after it was filled the last time
      put<DX>(tiles[now], next);
      __syncthreads();
    }
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int m = blockIdx.x * TM + i / 4 * (TM / 2) + ty + i % 4;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int n = blockIdx.y * TN + j / 4 * (TN / 2) + tx + j % 4;
      if (m < M && n < N) {
        const float c = DX ? sum[i][j] : sum[i][j] * s[n];
        C[m * ldc + n] = add ? C[m * ldc + n] + c : c;
      }
    }
  }
}

// Grid (ceil(M / 128), ceil(out / 64)).
extern "C" __global__ void __launch_bounds__(128, BLOCKS) rrd_int8_y(
    const float* x, const signed char* q, const float* s, float* y, int M, int in, int out, long long ldx,
    long long ldy, int add) {
  __shared__ __align__(16) Tiles tiles[2];
  product<false>(tiles, x, q, s, y, M, out, in, ldx, ldy, add);
}

// Grid (ceil(M / 128), ceil(in / 64)).
extern "C" __global__ void __launch_bounds__(128, BLOCKS) rrd_int8_dx(
    const float* dy, const signed char* q, const float* s, float* dx, int M, int in, int out, long long lddy,
    long long lddx, int add) {
  __shared__ __align__(16) Tiles tiles[2];
  product<true>(tiles, dy, q, s, dx, M, in, out, lddy, lddx, add);
}

// ---- dp4a ------------------------------------------------------------------------------------------------------------

constexpr float RANGE = 127.f * 65536.f;  // the largest element of a row, in units

// x as three int8, four columns a word: limbs [3, M, ceil(width / 4)], unit [M]. Grid (M). Where a row is not finite,
// its unit is NaN.
extern "C" __global__ void __launch_bounds__(128) rrd_int8_limbs(
    const float* x, const float* s, int* limbs, float* unit, int M, int width, long long ldx) {
  const int tid = threadIdx.x, words = (width + 3) / 4;
  const long long row = blockIdx.x;
  __shared__ float tops[4], odd[4];
  float top = 0.f, nothing = 0.f;
  for (int i = tid; i < width; i += 128) {
    const float value = x[row * ldx + i] * (s ? s[i] : 1.f);
    top = fmaxf(top, fabsf(value)), nothing += value * 0.f;
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
    nothing += __shfl_xor_sync(0xffffffffu, nothing, lanes);
  }
  if (tid % 32 == 0) tops[tid / 32] = top, odd[tid / 32] = nothing;
  __syncthreads();
  top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  nothing = (odd[0] + odd[1]) + (odd[2] + odd[3]);
  top = fmaxf(top, 1e-30f);  // so that its inverse is finite
  if (tid == 0) unit[row] = top / RANGE + nothing;
  const float inverse = RANGE / top;
  for (int w = tid; w < words; w += 128) {
    unsigned l[3] = {0u, 0u, 0u};
    for (int i = 0; i < 4; i++) {
      const int column = 4 * w + i;
      int rest = 0;
      if (column < width) rest = __float2int_rn(x[row * ldx + column] * (s ? s[column] : 1.f) * inverse);
      for (int n = 2; n >= 0; n--) {
        const int limb = n ? (signed char)rest : rest;
        l[n] |= (unsigned)(limb & 0xff) << 8 * i;
        rest = (rest - limb) / 256;
      }
    }
    for (int n = 0; n < 3; n++) limbs[(n * (long long)M + row) * words + w] = (int)l[n];
  }
}

#ifdef RRD_DP4A

constexpr int DT = 64, DK = 8;  // a tile is 64 x 64, 8 words of 4 terms at a time; a thread has 4 x 4 sums of each limb

__device__ __forceinline__ int dp4a(int a, int b, int c) {
#ifdef __CUDACC__
  asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(c) : "r"(a), "r"(b));  // NVRTC 11.8 does not know the intrinsic
  return c;
#else
  return __dp4a(a, b, c);
#endif
}

struct Words {
  int a[3][DK][DT + GAP], b[DK][DT + GAP];
};

// Rows of 4 bytes to columns of 4 bytes.
__device__ __forceinline__ void transpose(const int* in, int* out) {
  const unsigned x = __byte_perm(in[0], in[1], 0x5140), y = __byte_perm(in[2], in[3], 0x5140);
  const unsigned z = __byte_perm(in[0], in[1], 0x7362), w = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(x, y, 0x5410), out[1] = __byte_perm(x, y, 0x7632);
  out[2] = __byte_perm(z, w, 0x5410), out[3] = __byte_perm(z, w, 0x7632);
}

template <bool DX>
__device__ __forceinline__ void bring(Words& t, const int* limbs, const signed char* q, int M, int N, int K, int w0) {
  const int tid = threadIdx.x, words = (K + 3) / 4;
#pragma unroll
  for (int i = 0; i < 3 * DK * DT / 256; i++) {
    const int e = tid + i * 256, limb = e / (DK * DT), m = blockIdx.x * DT + e / DK % DT, w = w0 + e % DK;
    t.a[limb][e % DK][e / DK % DT] = m < M && w < words ? limbs[(limb * (long long)M + m) * words + w] : 0;
  }
  if (!DX) {
#pragma unroll
    for (int i = 0; i < DK * DT / 256; i++) {
      const int e = tid + i * 256, n = blockIdx.y * DT + e / DK;
      t.b[e % DK][e / DK] = n < N ? word_of(q + (long long)n * K, 4 * (w0 + e % DK), K) : 0;
    }
  } else if (tid < DK * DT / 4) {
    const int w = tid / (DT / 4), column = tid % (DT / 4) * 4;
    int rows[4], columns[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int k = 4 * (w0 + w) + i;
      rows[i] = k < K ? word_of(q + (long long)k * N, blockIdx.y * DT + column, N) : 0;
    }
    transpose(rows, columns);
#pragma unroll
    for (int i = 0; i < 4; i++) t.b[w][column + i] = columns[i];
  }
}

template <bool DX>
__device__ __forceinline__ void product_dp4a(Words& t, const int* limbs, const float* unit, const signed char* q,
                                             const float* s, float* C, int M, int N, int K, long long ldc, int add) {
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  int sum[3][4][4] = {};
  for (int w0 = 0; w0 < (K + 3) / 4; w0 += DK) {
    bring<DX>(t, limbs, q, M, N, K, w0);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < DK; w++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int b = t.b[w][tx + 16 * j];
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int limb = 0; limb < 3; limb++)
            sum[limb][i][j] = dp4a(t.a[limb][w][ty + 16 * i], b, sum[limb][i][j]);
      }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int m = blockIdx.x * DT + ty + 16 * i;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int n = blockIdx.y * DT + tx + 16 * j;
      if (m < M && n < N) {
        float c = sum[0][i][j] * 65536.f + (sum[1][i][j] * 256.f + sum[2][i][j]);
        c *= DX ? unit[m] : unit[m] * s[n];
        C[m * ldc + n] = add ? C[m * ldc + n] + c : c;
      }
    }
  }
}

// limbs and unit of x. Grid (ceil(M / 64), ceil(out / 64)).
extern "C" __global__ void __launch_bounds__(256) rrd_int8_y_dp4a(
    const int* limbs, const float* unit, const signed char* q, const float* s, float* y, int M, int in, int out,
    long long ldy, int add) {
  __shared__ __align__(16) Words words;
  product_dp4a<false>(words, limbs, unit, q, s, y, M, out, in, ldy, add);
}

// limbs and unit of dy times s. Grid (ceil(M / 64), ceil(in / 64)).
extern "C" __global__ void __launch_bounds__(256) rrd_int8_dx_dp4a(
    const int* limbs, const float* unit, const signed char* q, float* dx, int M, int in, int out, long long lddx,
    int add) {
  __shared__ __align__(16) Words words;
  product_dp4a<true>(words, limbs, unit, q, nullptr, dx, M, in, out, lddx, add);
}

#endif
