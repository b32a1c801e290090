// RWKV-7 on a CPU: the recurrence, the time mix around it, and the passes between products. fp32 inside; tensors are
// fp32 or bf16. The reference of everything here is rrd/ops/reference.py and the torch form in rrd/ops/rwkv7.py.
//
// Compiled with -march=native for the machine it runs on (rrd/ops/native.py): AVX-512, AVX2 or what there is. All
// sums are taken in one fixed order, so the result depends on neither thread count nor memory alignment.
//
// Rows of S belong to values, columns to keys: S[i][j], i < 64, j < 64. Of one token, for each row i:
//     u_i = S_i . a;   S_i <- S_i * d + u_i b + v_i k;   y_i = S_i . r
// Rows never meet, so a row is read and written once a token, and all of S (16 KB) stays in the first-level cache.
//
// What is called from Python takes its work in units that share nothing they write: a head of a sample, a piece of one,
// a vector. They are split over the threads that torch multiplies with.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__) || defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vec __attribute__((vector_size(W * 4)));
typedef int32_t ivec __attribute__((vector_size(W * 4)));

constexpr int N = 64;       // channels of a head
constexpr int NV = N / W;   // vectors of a head
constexpr int CHUNK = 32;   // tokens between the states that forward keeps; backward runs forward again between them
constexpr float DECAY = -0.6065306597126334f;  // -e^-1/2

typedef uint16_t bf16;

// ---- threads --------------------------------------------------------------------------------------------------------

// Of the OpenMP library that torch has loaded: threads of our own would share the cores with its, which may wait for
// work by spinning.
extern "C" {
void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((weak));
int omp_get_thread_num() __attribute__((weak));
int omp_get_num_threads() __attribute__((weak));
}

// work(from, to) for parts of [0, units), on up to that many threads; on one where there is no OpenMP.
template <class Work> static void spread(long units, long threads, Work work) {
  if (threads > units) threads = units;
  if (threads <= 1 || !GOMP_parallel || !omp_get_thread_num || !omp_get_num_threads) return work(0, units);
  struct Task { Work& work; long units; } task{work, units};
  GOMP_parallel([](void* given) {
    const Task& t = *static_cast<Task*>(given);
    const long i = omp_get_thread_num(), n = omp_get_num_threads();
    t.work(t.units * i / n, t.units * (i + 1) / n);
  }, &task, unsigned(threads), 0);
}

// ---- vectors --------------------------------------------------------------------------------------------------------

static inline vec splat(float x) { return vec{} + x; }
static inline vec load(const float* p) { vec v; std::memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }

typedef uint16_t half __attribute__((vector_size(W * 2)));
typedef uint32_t uvec __attribute__((vector_size(W * 4)));

static inline vec load(const bf16* p) {
  half h;
  std::memcpy(&h, p, sizeof h);
  return (vec)(__builtin_convertvector(h, uvec) << 16);
}

static inline void store(bf16* p, vec v) {  // to the nearest, ties to even; a NaN stays one
  const uvec bits = (uvec)v, nan = (uvec)(v != v);
  const uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const half h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), half);
  std::memcpy(p, &h, sizeof h);
}

// Lanes of a and b: of every block of `size` lanes the lower (or upper) half, a's beside b's.
constexpr int from_lane(int i, int size, bool upper) {
  return i / size * size + (upper ? size / 2 : 0) + i % (size / 2) + (i % size < size / 2 ? 0 : W);
}
template <int size, bool upper, int... i> static inline vec shuffled(vec a, vec b, std::integer_sequence<int, i...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, from_lane(i, size, upper)...);
#else
  return __builtin_shuffle(a, b, ivec{from_lane(i, size, upper)...});
#endif
}
template <int size, bool upper> static inline vec halves(vec a, vec b) {
  return shuffled<size, upper>(a, b, std::make_integer_sequence<int, W>());
}

// Sums of W vectors, as the lanes of one: each step adds halves of blocks, and so halves the number of vectors.
template <int size> static inline void fold(vec* x) {
  for (int i = 0; i < size / 2; i++)
    x[i] = halves<size, false>(x[i], x[i + size / 2]) + halves<size, true>(x[i], x[i + size / 2]);
  fold<size / 2>(x);
}
template <> inline void fold<1>(vec*) {}

static inline float sum(vec v) {
  float lanes[W];
  std::memcpy(lanes, &v, sizeof v);
  for (int half = W / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
  return lanes[0];
}

static inline vec choose(ivec condition, vec yes, vec no) {
  return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition));
}

// e^x to 2 ulp for -87 < x < 88, clamped outside (Cephes' expf).
static inline vec exp_(vec x) {
  x = choose(x < splat(-87.f), splat(-87.f), x);
  x = choose(x > splat(88.f), splat(88.f), x);
  const vec magic = splat(12582912.f);
  vec shifted = x * 1.44269504f + magic, n = shifted - magic;
  vec f = x - n * 0.693359375f;
  f = f - n * -2.12194440e-4f;
  vec p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.f;
  return (vec)((ivec)p + (((ivec)shifted - (ivec)magic) << 23));
}

static inline vec sigmoid(vec x) { return splat(1.f) / (splat(1.f) + exp_(-x)); }

struct Row {  // the 64 channels of one token of one head
  vec x[NV];
  inline vec& operator[](int j) { return x[j]; }
  inline const vec& operator[](int j) const { return x[j]; }
};

template <class X> static inline Row row(const X* p) {
  Row r;
  for (int j = 0; j < NV; j++) r[j] = load(p + j * W);
  return r;
}
template <class X> static inline void put(X* p, const Row& r) { for (int j = 0; j < NV; j++) store(p + j * W, r[j]); }
static inline float dot(const Row& a, const Row& b) {
  vec s = a[0] * b[0];
  for (int j = 1; j < NV; j++) s += a[j] * b[j];
  return sum(s);
}
static inline float total(const Row& a) {
  vec s = a[0];
  for (int j = 1; j < NV; j++) s += a[j];
  return sum(s);
}
#define EACH for (int j = 0; j < NV; j++)

// ---- the recurrence -------------------------------------------------------------------------------------------------

struct Token { float d[N], k[N], a[N], b[N], r[N], v[N]; };  // one head's part of one token, ready for the recurrence

static inline vec product(const Row& a, const Row& b) {  // the terms of their dot product, W sums of them
  vec s = a[0] * b[0];
  for (int j = 1; j < NV; j++) s += a[j] * b[j];
  return s;
}

// The state one token on, from S to `to` (which may be S); u and y out. W rows at a time: so many dot products are
// summed up in one go.
static inline void advance(const float* S, float* to, const Token& t, float* u, float* y) {
  const Row d = row(t.d), k = row(t.k), a = row(t.a), b = row(t.b), r = row(t.r);
  for (int first = 0; first < N; first += W) {
    vec parts[W];
    for (int i = 0; i < W; i++) parts[i] = product(row(S + (first + i) * N), a);
    fold<W>(parts);
    store(u + first, parts[0]);
    for (int i = 0; i < W; i++) {
      Row x = row(S + (first + i) * N);
      const vec ui = splat(u[first + i]), vi = splat(t.v[first + i]);
      EACH x[j] = x[j] * d[j] + ui * b[j] + vi * k[j];
      put(to + (first + i) * N, x);
      parts[i] = product(x, r);
    }
    fold<W>(parts);
    store(y + first, parts[0]);
  }
}

struct TokenGrad { float d[N], k[N], a[N], b[N], r[N], v[N]; };

// Back over one token: dS is the gradient of the state after it and becomes that of S, the state before. g.d is the
// gradient of d itself. y's product with the state after needs only S:
//     S'^T dy = d (S^T dy) + b (u . dy) + k (v . dy)
static inline void retreat(float* dS, const float* S, const Token& t, const float* u, const float* dy, TokenGrad& g) {
  const Row d = row(t.d), k = row(t.k), a = row(t.a), b = row(t.b), r = row(t.r);
  Row gd{}, gk{}, gb{}, gr{}, ga{};
  for (int first = 0; first < N; first += W) {
    vec du_parts[W], dv_parts[W];
    float du[W];
    for (int i = 0; i < W; i++) {
      const int n = first + i;
      const vec dyi = splat(dy[n]), ui = splat(u[n]), vi = splat(t.v[n]);
      const Row s = row(S + n * N);
      Row ds = row(dS + n * N);
      EACH {
        gr[j] += dyi * s[j];
        ds[j] += dyi * r[j];
        gd[j] += ds[j] * s[j];
        gb[j] += ds[j] * ui;
        gk[j] += ds[j] * vi;
      }
      put(dS + n * N, ds);
      dv_parts[i] = product(ds, k);
      du_parts[i] = product(ds, b);
    }
    fold<W>(dv_parts);
    store(g.v + first, dv_parts[0]);
    fold<W>(du_parts);
    store(du, du_parts[0]);
    for (int i = 0; i < W; i++) {
      const int n = first + i;
      const vec dui = splat(du[i]);
      const Row s = row(S + n * N);
      Row ds = row(dS + n * N);
      EACH {
        ga[j] += dui * s[j];
        ds[j] = ds[j] * d[j] + dui * a[j];
      }
      put(dS + n * N, ds);
    }
  }
  const float u_dy = dot(row(u), row(dy)), v_dy = dot(row(t.v), row(dy));
  EACH gr[j] = gr[j] * d[j] + b[j] * u_dy + k[j] * v_dy;
  put(g.d, gd); put(g.k, gk); put(g.a, ga); put(g.b, gb); put(g.r, gr);
}

static inline void copy(float* to, const float* from) { std::memcpy(to, from, N * N * sizeof(float)); }
static inline void start(float* S, const float* given) {
  if (given) copy(S, given); else std::memset(S, 0, N * N * sizeof(float));
}

// Walks one head. `Ends` turns inputs into tokens and outputs, and gradients of outputs into those of inputs.
template <class Ends> static void forward(Ends& ends, long T, const float* first, float* kept, float* last) {
  alignas(64) float S[N * N], u[N], y[N];
  alignas(64) Token t;
  start(S, first);
  for (long i = 0; i < T; i++) {
    if (kept && i % CHUNK == 0) copy(kept + i / CHUNK * N * N, S);
    ends.token(i, t);
    advance(S, S, t, u, y);
    ends.output(i, t, y);
  }
  copy(last, S);
}

template <class Ends> static void backward(Ends& ends, long T, const float* kept, const float* dlast, float* dfirst) {
  struct Work {
    alignas(64) float S[(CHUNK + 1) * N * N];
    alignas(64) Token t[CHUNK];
    alignas(64) float u[CHUNK][N], y[CHUNK][N], dS[N * N], dy[N];
    alignas(64) TokenGrad g;
  };
  const std::unique_ptr<Work> room(new Work);  // 600 KB that nobody needs to clear
  Work& w = *room;
  start(w.dS, dlast);
  for (long c = (T + CHUNK - 1) / CHUNK - 1; c >= 0; c--) {
    const long from = c * CHUNK, n = T - from < CHUNK ? T - from : CHUNK;
    copy(w.S, kept + c * N * N);
    for (long i = 0; i < n; i++) {
      ends.token(from + i, w.t[i]);
      advance(w.S + i * N * N, w.S + (i + 1) * N * N, w.t[i], w.u[i], w.y[i]);
    }
    for (long i = n - 1; i >= 0; i--) {
      ends.output_grad(from + i, w.t[i], w.y[i], w.dy);
      retreat(w.dS, w.S + i * N * N, w.t[i], w.u[i], w.dy, w.g);
      ends.token_grad(from + i, w.t[i], w.g);
    }
  }
  copy(dfirst, w.dS);
}

// ---- the op alone: r, log d, k, v, a, b [B, T, H, 64] fp32 -> y -----------------------------------------------------

struct Plain {
  const float *r, *log_d, *k, *v, *a, *b, *dy;
  float *y, *dr, *dlog_d, *dk, *dv, *da, *db;
  long stride;

  inline void token(long i, Token& t) {
    const long at = i * stride;
    std::memcpy(t.r, r + at, sizeof t.r); std::memcpy(t.k, k + at, sizeof t.k); std::memcpy(t.v, v + at, sizeof t.v);
    std::memcpy(t.a, a + at, sizeof t.a); std::memcpy(t.b, b + at, sizeof t.b);
    EACH store(t.d + j * W, exp_(load(log_d + at + j * W)));
  }
  inline void output(long i, const Token&, const float* from) { std::memcpy(y + i * stride, from, N * sizeof(float)); }
  inline void output_grad(long i, const Token&, const float*, float* to) {
    std::memcpy(to, dy + i * stride, N * sizeof(float));
  }
  inline void token_grad(long i, const Token& t, const TokenGrad& g) {
    const long at = i * stride;
    std::memcpy(dr + at, g.r, sizeof g.r); std::memcpy(dk + at, g.k, sizeof g.k); std::memcpy(dv + at, g.v, sizeof g.v);
    std::memcpy(da + at, g.a, sizeof g.a); std::memcpy(db + at, g.b, sizeof g.b);
    EACH store(dlog_d + at + j * W, load(g.d + j * W) * load(t.d + j * W));
  }
};

static Plain plain(const float* const* in, const float* dy, float* const* out, long at, long stride) {
  Plain p{};
  p.r = in[0] + at; p.log_d = in[1] + at; p.k = in[2] + at; p.v = in[3] + at; p.a = in[4] + at; p.b = in[5] + at;
  p.stride = stride;
  if (dy) {
    p.dy = dy + at;
    p.dr = out[0] + at; p.dlog_d = out[1] + at; p.dk = out[2] + at; p.dv = out[3] + at; p.da = out[4] + at;
    p.db = out[5] + at;
  } else {
    p.y = out[0] + at;
  }
  return p;
}

// ---- the time mix's core: projections -> what the output product multiplies -----------------------------------------

enum { R, Z, K, V, ALPHA, NU, G, V_FIRST, INPUTS };        // NU and V_FIRST are null in the first time mix
enum { W0, A0, V0, K_K, K_A, R_K, LN_W, LN_B, PARAMS };    // [C] each, fp32
constexpr float NORM_EPS = 64e-5f, KAPPA_EPS = 1e-12f;

template <class X> struct Mix {
  const X* in[INPUTS];
  const float* p[PARAMS];
  const X* dout;
  X *out, *din[INPUTS];
  float* dp;  // [PARAMS][64], of this head
  long stride;
  struct Kept { Row kappa, alpha, mix; float norm; };

  inline Row of(int which, long i) const { return row(in[which] + i * stride); }
  inline Row param(int which) const { return row(p[which]); }

  inline float normed(const Row& k, Row& kappa) const {  // kappa = k k_k, of length 1
    const Row k_k = param(K_K);
    EACH kappa[j] = k[j] * k_k[j];
    float norm = std::sqrt(dot(kappa, kappa));
    if (norm < KAPPA_EPS) norm = KAPPA_EPS;
    EACH kappa[j] = kappa[j] / norm;
    return norm;
  }
  inline Row alpha_of(long i) const {
    Row x = of(ALPHA, i);
    const Row a0 = param(A0);
    EACH x[j] = sigmoid(a0[j] + x[j]);
    return x;
  }
  inline Row nu_of(long i) const {
    Row x = of(NU, i);
    const Row v0 = param(V0);
    EACH x[j] = sigmoid(v0[j] + x[j]);
    return x;
  }

  inline void token(long i, Token& t) const {
    const Row z = of(Z, i), k = of(K, i), alpha = alpha_of(i), w0 = param(W0), k_a = param(K_A);
    Row kappa, x;
    normed(k, kappa);
    EACH x[j] = exp_(sigmoid(w0[j] + z[j]) * DECAY);
    put(t.d, x);
    EACH x[j] = k[j] * (1.f + (alpha[j] - 1.f) * k_a[j]);
    put(t.k, x);
    EACH x[j] = -kappa[j];
    put(t.a, x);
    EACH x[j] = kappa[j] * alpha[j];
    put(t.b, x);
    put(t.r, of(R, i));
    Row v = of(V, i);
    if (in[NU]) {
      const Row nu = nu_of(i), first = of(V_FIRST, i);
      EACH v[j] = v[j] + (first[j] - v[j]) * nu[j];
    }
    put(t.v, v);
  }

  static inline float centred(const float* y, Row& hat) {  // (y - mean) / std; returns 1 / std
    hat = row(y);
    const float mean = total(hat) / N;
    EACH hat[j] = hat[j] - mean;
    const float rstd = 1.f / std::sqrt(dot(hat, hat) / N + NORM_EPS);
    EACH hat[j] = hat[j] * rstd;
    return rstd;
  }
  inline float bonus(const Token& t) const {
    const Row r = row(t.r), k = row(t.k), r_k = param(R_K);
    vec s = r[0] * k[0] * r_k[0];
    for (int j = 1; j < NV; j++) s += r[j] * k[j] * r_k[j];
    return sum(s);
  }

  inline void output(long i, const Token& t, const float* y) {
    Row hat;
    centred(y, hat);
    const float s = bonus(t);
    const Row w = param(LN_W), b = param(LN_B), v = row(t.v), g = of(G, i);
    EACH hat[j] = (hat[j] * w[j] + b[j] + s * v[j]) * g[j];
    put(out + i * stride, hat);
  }

  // What the output's gradient is to y; gives the gate its gradient, and leaves those through the bonus for token_grad.
  Row dr_bonus, dk_bonus, dv_bonus;
  inline void add(int which, const Row& x) {
    float* at = dp + which * N;
    EACH store(at + j * W, load(at + j * W) + x[j]);
  }

  inline void output_grad(long i, const Token& t, const float* y, float* dy) {
    Row hat, x, m = row(dout + i * stride);
    const float rstd = centred(y, hat), s = bonus(t);
    const Row w = param(LN_W), b = param(LN_B), r_k = param(R_K);
    const Row v = row(t.v), k = row(t.k), r = row(t.r), g = of(G, i);
    EACH x[j] = m[j] * (hat[j] * w[j] + b[j] + s * v[j]);
    put(din[G] + i * stride, x);
    EACH m[j] = m[j] * g[j];
    const float ds = dot(m, v);
    EACH {
      dv_bonus[j] = m[j] * s;
      dr_bonus[j] = ds * k[j] * r_k[j];
      dk_bonus[j] = ds * r[j] * r_k[j];
      x[j] = ds * r[j] * k[j];
    }
    add(R_K, x);
    add(LN_B, m);
    EACH x[j] = m[j] * hat[j];
    add(LN_W, x);
    EACH m[j] = m[j] * w[j];
    const float mean = total(m) / N, along = dot(m, hat) / N;
    EACH m[j] = (m[j] - mean - hat[j] * along) * rstd;
    put(dy, m);
  }

  inline void token_grad(long i, const Token& t, const TokenGrad& g) {
    const long at = i * stride;
    const Row k = of(K, i), alpha = alpha_of(i), k_a = param(K_A), k_k = param(K_K);
    Row x, y, dk = row(g.k), dv = row(g.v), dalpha, kappa, dkappa;
    const Row da = row(g.a), db = row(g.b), gd = row(g.d), d = row(t.d);
    EACH { x[j] = load(g.r + j * W) + dr_bonus[j]; dk[j] += dk_bonus[j]; dv[j] += dv_bonus[j]; }
    put(din[R] + at, x);
    // the decay
    const Row z = of(Z, i), w0 = param(W0);
    EACH { const vec sg = sigmoid(w0[j] + z[j]); x[j] = gd[j] * d[j] * DECAY * sg * (1.f - sg); }
    put(din[Z] + at, x);
    add(W0, x);
    // keys: through k', and through kappa of length 1
    const float norm = normed(k, kappa);
    EACH { dkappa[j] = db[j] * alpha[j] - da[j]; dalpha[j] = db[j] * kappa[j] + dk[j] * k[j] * k_a[j]; }
    const float along = norm > KAPPA_EPS ? dot(dkappa, kappa) : 0.f;
    EACH {
      dkappa[j] = (dkappa[j] - kappa[j] * along) / norm;
      x[j] = dkappa[j] * k[j];
      y[j] = dk[j] * k[j] * (alpha[j] - 1.f);
    }
    add(K_K, x);
    add(K_A, y);
    EACH x[j] = dk[j] * (1.f + (alpha[j] - 1.f) * k_a[j]) + dkappa[j] * k_k[j];
    put(din[K] + at, x);
    EACH x[j] = dalpha[j] * alpha[j] * (1.f - alpha[j]);
    put(din[ALPHA] + at, x);
    add(A0, x);
    // values: mixed with the first ones
    if (in[NU]) {
      const Row nu = nu_of(i), v = of(V, i), first = of(V_FIRST, i);
      EACH x[j] = dv[j] * (first[j] - v[j]) * nu[j] * (1.f - nu[j]);
      put(din[NU] + at, x);
      add(V0, x);
      EACH { x[j] = dv[j] * nu[j]; dv[j] = dv[j] - x[j]; }
      put(din[V_FIRST] + at, x);
    }
    put(din[V] + at, dv);
  }
};

template <class X> static Mix<X> mix(const X* const* in, const float* const* params, long b, long h, long T, long H) {
  Mix<X> m{};
  m.stride = H * N;
  const long at = b * T * m.stride + h * N;
  for (int i = 0; i < INPUTS; i++) m.in[i] = in[i] ? in[i] + at : nullptr;
  for (int i = 0; i < PARAMS; i++) m.p[i] = params[i] ? params[i] + h * N : nullptr;
  return m;
}

template <class X> static void mix_forward(const X* const* in, const float* const* params, const float* first, X* out,
                                           float* kept, float* last, long T, long H, long from, long to) {
  const long chunks = (T + CHUNK - 1) / CHUNK, S = N * N;
  for (long i = from; i < to; i++) {
    Mix<X> m = mix(in, params, i / H, i % H, T, H);
    m.out = out + i / H * T * H * N + i % H * N;
    forward(m, T, first ? first + i * S : nullptr, kept ? kept + i * chunks * S : nullptr, last + i * S);
  }
}

// din: as in, null where in is; dparams [B * H, PARAMS, 64] is overwritten.
template <class X> static void mix_backward(const X* const* in, const float* const* params, const float* kept,
                                            const X* dout, const float* dlast, X* const* din, float* dparams,
                                            float* dfirst, long T, long H, long from, long to) {
  const long chunks = (T + CHUNK - 1) / CHUNK, S = N * N;
  for (long i = from; i < to; i++) {
    Mix<X> m = mix(in, params, i / H, i % H, T, H);
    const long at = i / H * T * H * N + i % H * N;
    m.dout = dout + at;
    for (int n = 0; n < INPUTS; n++) m.din[n] = din[n] ? din[n] + at : nullptr;
    m.dp = dparams + i * PARAMS * N;
    std::memset(m.dp, 0, PARAMS * N * sizeof(float));
    backward(m, T, kept + i * chunks * S, dlast ? dlast + i * S : nullptr, dfirst + i * S);
  }
}

// ---- layer norm, token shift and its mixes: x -> n + (n_before - n) * mu_s, n = norm(x) -----------------------------

constexpr int MIXES = 6;

constexpr long PIECE = 64;  // rows of a unit; sums over rows are of a unit's first, so threads do not matter

struct Norm { const float *w, *b, *const *mu; long n_mu, C; };

// Mean and 1/std of a row.
template <class X> static inline void moments(const X* x, long C, float eps, float* stats) {
  vec s{}, q{};
  for (long c = 0; c < C; c += W) s += load(x + c);
  const float mean = sum(s) / C;
  for (long c = 0; c < C; c += W) { const vec e = load(x + c) - mean; q += e * e; }
  stats[0] = mean; stats[1] = 1.f / std::sqrt(sum(q) / C + eps);
}
template <class X> static inline void normed_row(const X* x, const float* stats, const Norm& p, float* to) {
  for (long c = 0; c < p.C; c += W) store(to + c, (load(x + c) - stats[0]) * stats[1] * load(p.w + c) + load(p.b + c));
}
template <class X> static inline void row_or_zeros(const X* row, long C, float* to) {
  for (long c = 0; c < C; c += W) store(to + c, row ? load(row + c) : splat(0.f));
}

// Rows [from, to) of one sequence of T. `before` [C] is what stood before the first row, null for zeros. Writes out[s]
// [T, C], the last normed row, and mean and 1/std of each row.
template <class X> static void shift_forward(const X* x, const Norm& p, const X* before, X* const* out, X* last,
                                             float* stats, long T, float eps, long from, long to) {
  const long C = p.C;
  std::vector<float> room(2 * C);
  float *now = room.data(), *then = now + C;
  if (from) {
    float of_then[2];
    moments(x + (from - 1) * C, C, eps, of_then);
    normed_row(x + (from - 1) * C, of_then, p, then);
  } else {
    row_or_zeros(before, C, then);
  }
  for (long t = from; t < to; t++) {
    moments(x + t * C, C, eps, stats + 2 * t);
    normed_row(x + t * C, stats + 2 * t, p, now);
    for (long m = 0; m < p.n_mu; m++)
      for (long c = 0; c < C; c += W) {
        const vec n = load(now + c);
        store(out[m] + t * C + c, n + (load(then + c) - n) * load(p.mu[m] + c));
      }
    std::swap(now, then);
  }
  if (to == T)
    for (long c = 0; c < C; c += W) store(last + c, load(then + c));
}

// Back over rows [from, to). dx [T, C] and dbefore [C] are overwritten; so is dparams [2 + n_mu, C], these rows' part
// of the gradients of weight, bias and each mu. dlast [C] may be null.
template <class X> static void shift_backward(const X* x, const float* stats, const Norm& p, const X* before,
                                              const X* const* dout, const X* dlast, X* dx, X* dbefore, float* dparams,
                                              long T, long from, long to) {
  const long C = p.C;
  std::vector<float> room(4 * C);
  float *carry = room.data(), *now = carry + C, *then = now + C, *dn = then + C;
  float *dw = dparams, *db = dw + C, *dmu = db + C;
  std::memset(dparams, 0, (2 + p.n_mu) * C * sizeof(float));
  auto normed_before = [&](long t, float* row) {
    if (t) normed_row(x + (t - 1) * C, stats + 2 * (t - 1), p, row); else row_or_zeros(before, C, row);
  };
  if (to == T) {
    row_or_zeros(dlast, C, carry);
  } else {
    for (long c = 0; c < C; c += W) {
      vec back{};
      for (long m = 0; m < p.n_mu; m++) back += load(dout[m] + to * C + c) * load(p.mu[m] + c);
      store(carry + c, back);
    }
  }
  normed_before(to, now);
  for (long t = to - 1; t >= from; t--) {
    const float mean = stats[2 * t], rstd = stats[2 * t + 1];
    normed_before(t, then);
    vec along{}, level{};
    for (long c = 0; c < C; c += W) {
      vec d = load(carry + c), back{};
      const vec difference = load(then + c) - load(now + c);
      for (long m = 0; m < p.n_mu; m++) {
        const vec g = load(dout[m] + t * C + c), moved = g * load(p.mu[m] + c);
        d += g - moved;
        back += moved;
        float* at = dmu + m * C + c;
        store(at, load(at) + g * difference);
      }
      store(carry + c, back);
      const vec hat = (load(x + t * C + c) - mean) * rstd;
      store(dw + c, load(dw + c) + d * hat);
      store(db + c, load(db + c) + d);
      d = d * load(p.w + c);
      store(dn + c, d);
      level += d;
      along += d * hat;
    }
    const float m = sum(level) / C, a = sum(along) / C;
    for (long c = 0; c < C; c += W) {
      const vec hat = (load(x + t * C + c) - mean) * rstd;
      store(dx + t * C + c, (load(dn + c) - m - hat * a) * rstd);
    }
    std::swap(now, then);
  }
  if (!from)
    for (long c = 0; c < C; c += W) store(dbefore + c, load(carry + c));
}

static inline long pieces(long T) { return (T + PIECE - 1) / PIECE; }

struct Piece { long sample, from, to; };  // the units of B sequences, one sequence after another
static inline Piece piece(long unit, long T) {
  const long from = unit % pieces(T) * PIECE;
  return {unit / pieces(T), from, from + PIECE < T ? from + PIECE : T};
}

template <class X> static inline X* of_sample(X* p, long sample, long size) { return p ? p + sample * size : nullptr; }

template <class X> static void norm_shift_forward(const X* x, const Norm& p, const X* before, X* const* out, X* last,
                                                  float* stats, long T, float eps, long from, long to) {
  for (long i = from; i < to; i++) {
    const auto [n, first, end] = piece(i, T);
    X* outs[MIXES];
    for (long m = 0; m < p.n_mu; m++) outs[m] = out[m] + n * T * p.C;
    shift_forward<X>(x + n * T * p.C, p, of_sample(before, n, p.C), outs, last + n * p.C, stats + n * T * 2, T, eps,
                     first, end);
  }
}

// dparams [B, pieces, 2 + n_mu, C].
template <class X> static void norm_shift_backward(const X* x, const float* stats, const Norm& p, const X* before,
                                                   const X* const* dout, const X* dlast, X* dx, X* dbefore,
                                                   float* dparams, long T, long from, long to) {
  for (long i = from; i < to; i++) {
    const auto [n, first, end] = piece(i, T);
    const X* douts[MIXES];
    for (long m = 0; m < p.n_mu; m++) douts[m] = dout[m] + n * T * p.C;
    shift_backward<X>(x + n * T * p.C, stats + n * T * 2, p, of_sample(before, n, p.C), douts,
                      of_sample(dlast, n, p.C), dx + n * T * p.C, dbefore + n * p.C,
                      dparams + i * (2 + p.n_mu) * p.C, T, first, end);
  }
}

// ---- relu(h)^2: h becomes relu(h) -----------------------------------------------------------------------------------

template <class X> static void relu2_forward(X* h, X* y, long from, long to) {
  for (long i = from; i < to; i += W) {
    const vec x = load(h + i), p = choose(x <= splat(0.f), splat(0.f), x);  // a NaN stays one
    store(h + i, p);
    store(y + i, p * p);
  }
}

template <class X> static void relu2_backward(const X* relu, const X* dy, X* dh, long from, long to) {
  for (long i = from; i < to; i += W) store(dh + i, load(relu + i) * load(dy + i) * 2.f);
}

// ---- what Python calls ----------------------------------------------------------------------------------------------

extern "C" {

int rrd_vector_floats() { return W; }
int rrd_chunk() { return CHUNK; }
int rrd_piece() { return PIECE; }

int rrd_team(int threads) {  // how many threads share as many units
  std::atomic<int> parts{0};
  spread(threads, threads, [&](long, long) { parts++; });
  return parts;
}

void rrd_wkv7_forward(const float* const* in, const float* first, float* y, float* kept, float* last, long T, long H,
                      long units, long threads) {
  const long chunks = (T + CHUNK - 1) / CHUNK, S = N * N;
  spread(units, threads, [=](long from, long to) {
    for (long i = from; i < to; i++) {
      Plain p = plain(in, nullptr, &y, i / H * T * H * N + i % H * N, H * N);
      forward(p, T, first ? first + i * S : nullptr, kept ? kept + i * chunks * S : nullptr, last + i * S);
    }
  });
}

void rrd_wkv7_backward(const float* const* in, const float* kept, const float* dy, const float* dlast,
                       float* const* din, float* dfirst, long T, long H, long units, long threads) {
  const long chunks = (T + CHUNK - 1) / CHUNK, S = N * N;
  spread(units, threads, [=](long from, long to) {
    for (long i = from; i < to; i++) {
      Plain p = plain(in, dy, din, i / H * T * H * N + i % H * N, H * N);
      backward(p, T, kept + i * chunks * S, dlast ? dlast + i * S : nullptr, dfirst + i * S);
    }
  });
}

#define FOR_TYPE(suffix, X)                                                                                          \
  void rrd_time_mix_forward_##suffix(const X* const* in, const float* const* params, const float* first, X* out,     \
                                     float* kept, float* last, long T, long H, long units, long threads) {           \
    spread(units, threads, [=](long from, long to) {                                                                 \
      mix_forward<X>(in, params, first, out, kept, last, T, H, from, to);                                            \
    });                                                                                                              \
  }                                                                                                                  \
  void rrd_time_mix_backward_##suffix(const X* const* in, const float* const* params, const float* kept,             \
                                      const X* dout, const float* dlast, X* const* din, float* dparams,              \
                                      float* dfirst, long T, long H, long units, long threads) {                     \
    spread(units, threads, [=](long from, long to) {                                                                 \
      mix_backward<X>(in, params, kept, dout, dlast, din, dparams, dfirst, T, H, from, to);                          \
    });                                                                                                              \
  }                                                                                                                  \
  void rrd_norm_shift_forward_##suffix(const X* x, const float* w, const float* b, const float* const* mu,           \
                                       long n_mu,                                                                    \
                                       const X* before, X* const* out, X* last, float* stats, long T, long C,        \
                                       float eps, long units, long threads) {                                        \
    spread(units, threads, [=](long from, long to) {                                                                 \
      norm_shift_forward<X>(x, {w, b, mu, n_mu, C}, before, out, last, stats, T, eps, from, to);                     \
    });                                                                                                              \
  }                                                                                                                  \
  void rrd_norm_shift_backward_##suffix(const X* x, const float* stats, const float* w, const float* b,              \
                                        const float* const* mu, long n_mu, const X* before,                          \
                                        const X* const* dout, const X* dlast, X* dx, X* dbefore, float* dparams,     \
                                        long T, long C, long units, long threads) {                                  \
    spread(units, threads, [=](long from, long to) {                                                                 \
      norm_shift_backward<X>(x, stats, {w, b, mu, n_mu, C}, before, dout, dlast, dx, dbefore, dparams, T, from,      \
                             to);                                                                                    \
    });                                                                                                              \
  }                                                                                                                  \
  void rrd_relu2_forward_##suffix(X* h, X* y, long units, long threads) {                                            \
    spread(units, threads, [=](long from, long to) { relu2_forward<X>(h, y, from * W, to * W); });                   \
  }                                                                                                                  \
  void rrd_relu2_backward_##suffix(const X* relu, const X* dy, X* dh, long units, long threads) {                    \
    spread(units, threads, [=](long from, long to) { relu2_backward<X>(relu, dy, dh, from * W, to * W); });          \
  }

FOR_TYPE(f32, float)
FOR_TYPE(bf16, bf16)
}
