/* The yardstick of the benchmark: Jin and Luo's algorithm in plain C, one seed at a time.
 *
 * This is the program that a C programmer would write for one size and one regularizer,
 * without masks, certificates and care for extreme numbers. It does what the engine does:
 * Newton's method from the last q, with factors that are kept while they are good enough,
 * a trajectory, and the importance-weighted update. The sizes are constants:
 *
 *     cc -O3 -march=native -DLAYERS=3 -DWIDTH=3 -DACTIONS=3
 *
 * One state is in the first layer, WIDTH in the others. There are no intrinsics. States are the
 * last index of arrays, so that the compiler can vectorize over the states of one seed. PAD
 * rounds the lengths of such loops up to a multiple, which saves their remainders. HALF leaves
 * out one half of symmetric matrices, which pays without vector instructions.
 */
#include <math.h>

#ifndef PAD
#define PAD 1
#endif
#ifndef HALF
#define HALF 0
#endif
#define BEGIN(i) (HALF ? (i) : 0)
#define ROUND_UP(n) (((n) + PAD - 1) / PAD * PAD)
#define L LAYERS
#define W WIDTH
#define A ACTIONS
#define S (1 + (L - 1) * W)
#define ROW ROUND_UP(W)
/* Loops over a layer may run ROW - W states beyond it. */
#define N ROUND_UP(S + ROW - W)

/* The relative accuracies of the engine; see torch_occ/kernels/solver/newton.py. */
#define CLOSE 1.490116119384765625e-8
#define LEFT (1e-5 * CLOSE)
#define LIKELY 3e-14
#define WORTH 1e-3
#define CALM 5e-3

static inline int first(int k) { return k == 0 ? 0 : 1 + (k - 1) * W; }
static inline int size(int k) { return k == 0 ? 1 : W; }
static inline double larger(double x, double y) { return x > y ? x : y; }

/* The transitions, once with the next state in the last index, once with the state; and their
 * differences to those of action 0. All are zero in the last layer. */
static double P[A][S][ROW], from[A][W][N], apart[A][S][ROW];
/* Per pair: q, the cumulative loss, the gradient of the objective, q^(-1/2), the same power of
 * the sum of the state's other pairs, and dq. */
static double q[A][N], loss[A][N], g[A][N], own[A][N], rest[A][N], dq[A][N];
/* The inverse Hessian of a state is R + p p' / kappa, where the sum of p is 1, and R is
 * diag(inverse) - softness inverse inverse'. So R 1 = 0. soft is 1 / kappa. */
static double inverse[A][N], p[A][N], softness[N], kappa[N], soft[N];
/* The factors L D L' of E H^-1 E', block by block: L' (above its diagonal of ones), 1 / D, and
 * the transposed block below the diagonal. */
static double upper[L][W][ROW], pivot[L][W], below[L][W][ROW];
static double total[N], V[N];

/* The gradient of the objective. Its Hessian needs the same roots. */
static void derive(double weight, double alpha, double beta) {
    double through[N], half = 0.5 * weight;
    for (int s = 0; s < N; s++) total[s] = through[s] = 0;
    for (int a = 0; a < A; a++)
        for (int s = 0; s < N; s++) total[s] += q[a][s];
    for (int a = 0; a < A; a++)
        for (int s = 0; s < N; s++) {
            double root = 1 / sqrt(q[a][s]), other = 1 / sqrt(total[s] - q[a][s]);
            double back = half * alpha * other;
            g[a][s] = loss[a][s] - root * (half + beta * root) + back;
            through[s] += back;
            own[a][s] = root;
            rest[a][s] = other;
        }
    for (int a = 0; a < A; a++)
        for (int s = 0; s < N; s++) g[a][s] -= through[s];
}

/* The inverse Hessian of every state. The Hessian is diag(d + w) - 1 w' - w 1' + sum(w) 1 1'. */
static void reduce(double weight, double alpha, double beta) {
    double sum[N], e[N], stiff[N], ratio[N], quarter = 0.25 * weight;
    for (int s = 0; s < N; s++) {
        sum[s] = stiff[s] = 0;
        e[s] = 1;
    }
    for (int a = 0; a < A; a++)
        for (int s = 0; s < N; s++) {
            double square = own[a][s] * own[a][s];
            double d = square * (quarter * own[a][s] + beta * square);
            double w = quarter * alpha * rest[a][s] * (rest[a][s] * rest[a][s]);
            inverse[a][s] = 1 / (d + w);
            p[a][s] = w * inverse[a][s];
            sum[s] += inverse[a][s];
            e[s] -= p[a][s];
            stiff[s] += p[a][s] * d;
        }
    for (int s = 0; s < N; s++) {
        softness[s] = 1 / sum[s];
        ratio[s] = e[s] * softness[s];
        kappa[s] = stiff[s] + e[s] * ratio[s];
        soft[s] = 1 / kappa[s];
    }
    for (int a = 0; a < A; a++)
        for (int s = 0; s < N; s++) p[a][s] += ratio[s] * inverse[a][s];
}

/* Factorize E H^-1 E', after `reduce`. The block of layer k is diag(1 / kappa) plus a sum of
 * products x y' of rows: for every state before it A - 1 from R, one from its projection, one
 * from p p' / kappa, and one that the elimination of this state leaves. */
static void factorize(void) {
    pivot[0][0] = kappa[0];
    for (int k = 1; k < L; k++) {
        double block[W][ROW] = {{0}}, left[W][ROW];
        for (int i = 0; i < W; i++) block[i][i] = soft[first(k) + i];
        for (int b = 0; b < size(k - 1); b++) {
            int s = first(k - 1) + b;
            double x[A + 2][ROW] = {{0}}, y[A + 2][ROW];
            for (int a = 1; a < A; a++)
                for (int j = 0; j < ROW; j++) {
                    x[a][j] = apart[a][s][j];
                    y[a][j] = inverse[a][s] * x[a][j];
                    x[0][j] += y[a][j];
                }
            for (int a = 0; a < A; a++)
                for (int j = 0; j < ROW; j++) x[A][j] += p[a][s] * P[a][s][j];
            for (int j = 0; j < ROW; j++) {
                y[0][j] = -softness[s] * x[0][j];
                y[A][j] = soft[s] * x[A][j];
                x[A + 1][j] = -y[A][j];
            }
            for (int c = 0; c < b; c++)
                for (int j = 0; j < ROW; j++) x[A + 1][j] -= upper[k - 1][c][b] * left[c][j];
            for (int j = 0; j < ROW; j++) {
                left[b][j] = x[A + 1][j];
                below[k][b][j] = pivot[k - 1][b] * x[A + 1][j];
                y[A + 1][j] = -below[k][b][j];
            }
            for (int i = 0; i < W; i++)
                for (int j = BEGIN(i); j < ROW; j++) {
                    double sum = block[i][j];
                    for (int c = 0; c < A + 2; c++) sum += x[c][i] * y[c][j];
                    block[i][j] = sum;
                }
        }
        for (int i = 0; i < W; i++) {
            for (int c = 0; c < i; c++)
                for (int j = BEGIN(i); j < ROW; j++) block[i][j] -= upper[k][c][i] * block[c][j];
            pivot[k][i] = 1 / block[i][i];
            for (int j = BEGIN(i); j < ROW; j++) upper[k][i][j] = pivot[k][i] * block[i][j];
        }
    }
}

/* Write dq and V that solve H dq = E'V - g and E (q + dq) = e_0. */
static void solve(void) {
    double mean[N], held[N], change[A][N], rhs[N], ahead[A][N];
    for (int s = 0; s < N; s++) mean[s] = V[s] = 0;
    for (int a = 0; a < A; a++)
        for (int s = 0; s < N; s++) {
            mean[s] += inverse[a][s] * g[a][s];
            V[s] += p[a][s] * g[a][s];
        }
    for (int s = 0; s < N; s++) {
        mean[s] *= softness[s];
        held[s] = V[s] * soft[s];
        rhs[s] = held[s] - total[s];
    }
    for (int a = 0; a < A; a++)
        for (int s = 0; s < N; s++) {
            dq[a][s] = -(p[a][s] * held[s] + inverse[a][s] * (g[a][s] - mean[s]));
            change[a][s] = dq[a][s] + q[a][s];
        }
    rhs[0] += 1;
    for (int k = 1; k < L; k++) {
        double row[ROW] = {0}, *y = rhs + first(k);
        for (int s = first(k - 1); s < first(k); s++)
            for (int a = 0; a < A; a++)
                for (int j = 0; j < ROW; j++) row[j] += P[a][s][j] * change[a][s];
        for (int i = 0; i < size(k - 1); i++)
            for (int j = 0; j < ROW; j++) row[j] -= below[k][i][j] * rhs[first(k - 1) + i];
        for (int j = 0; j < W; j++) y[j] += row[j];
        for (int j = 0; j < W; j++)
            for (int i = j + 1; i < W; i++) y[i] -= upper[k][j][i] * y[j];
    }
    /* V began as p'g, which leaves the padding where it is. */
    for (int k = L - 1; k >= 0; k--)
        for (int i = size(k) - 1; i >= 0; i--) {
            int s = first(k) + i;
            double sum = pivot[k][i] * rhs[s];
            if (k + 1 < L)
                for (int j = 0; j < W; j++) sum -= below[k + 1][i][j] * V[first(k + 1) + j];
            for (int j = i + 1; j < size(k); j++) sum -= upper[k][i][j] * V[first(k) + j];
            V[s] = sum;
        }
    /* Beyond the end of a layer stand numbers of the next one, which are written later. */
    for (int a = 0; a < A; a++) {
        for (int s = 0; s < N; s++) ahead[a][s] = 0;
        for (int k = 0; k + 1 < L; k++) {
            for (int i = 0; i < ROW; i++) {
                double sum = 0;
                for (int j = 0; j < W; j++) sum += from[a][j][first(k) + i] * V[first(k + 1) + j];
                ahead[a][first(k) + i] = sum;
            }
        }
    }
    for (int s = 0; s < N; s++) mean[s] = held[s] = 0;
    for (int a = 0; a < A; a++)
        for (int s = 0; s < N; s++) {
            mean[s] += inverse[a][s] * ahead[a][s];
            held[s] += p[a][s] * ahead[a][s];
        }
    for (int s = 0; s < N; s++) {
        mean[s] *= softness[s];
        held[s] = (V[s] - held[s]) * soft[s];
    }
    for (int a = 0; a < A; a++)
        for (int s = 0; s < N; s++)
            dq[a][s] += p[a][s] * held[s] - inverse[a][s] * (ahead[a][s] - mean[s]);
}

/* One FTRL step from q. `stale` is the relative error of the factors, `recent` the relative
 * change in the first steps of the last episodes. Adds to the numbers of steps and of factors. */
static void newton(double weight, double alpha, double beta, double *stale, double *recent,
                   long *counts) {
    int anew = *recent < CALM ? *stale > 3 * *recent : *stale > WORTH || *stale > 0.1 * *recent;
    for (int steps = 0; steps < 100; steps++) {
        derive(weight, alpha, beta);
        if (anew) {
            reduce(weight, alpha, beta);
            factorize();
            *stale = 0;
            counts[1]++;
        }
        solve();
        counts[0]++;
        double moved = 0, fall = 0;
        for (int a = 0; a < A; a++)
            for (int s = 0; s < N; s++) {
                double change = dq[a][s] * own[a][s] * own[a][s];
                moved = larger(moved, fabs(change));
                fall = larger(fall, -change);
            }
        double length = fall <= 0.5 ? 1 : 1 / (1 + fall);
        for (int a = 0; a < A; a++)
            for (int s = 0; s < N; s++) q[a][s] += length * dq[a][s];
        if (steps == 0) *recent = larger(moved, 0.9 * *recent);
        int done = moved <= CLOSE && *stale * moved <= LEFT;
        double following = (*stale + moved) * moved;
        *stale += 2 * moved;
        anew = *stale * following > LIKELY;
        if (done) return;
    }
}

/* The index at which the sum of the shares exceeds the target. */
static int draw(const double *shares, int stride, int n, double target) {
    int i = 0;
    for (double sum = shares[0]; i < n - 1 && sum <= target; sum += shares[++i * stride]);
    return i;
}

/* Play episodes before + 1, ..., before + episodes.
 *
 * transitions is (S, A, W), means (S, A), uniforms (episodes, L, 3). start (S, A) holds the first
 * q and receives the last one. results receives the numbers of Newton steps and of
 * factorizations, and the expected loss. The cumulative loss begins at zero. */
void play(const double *restrict transitions, const double *restrict means,
          const double *restrict uniforms, long before, long episodes, double alpha, double beta,
          double gamma, double *restrict start, double *restrict results) {
    static double mean[A][N];
    long counts[2] = {0};
    double stale = 1, recent = 0, expected = 0;
    for (int a = 0; a < A; a++)
        for (int s = 0; s < N; s++) {
            q[a][s] = s < S ? start[s * A + a] : 1.0 / A;
            mean[a][s] = s < S ? means[s * A + a] : 0;
            loss[a][s] = 0;
            for (int j = 0; j < W && s < S; j++) {
                const double *row = transitions + s * A * W + j;
                P[a][s][j] = from[a][j][s] = row[a * W];
                apart[a][s][j] = row[a * W] - row[0];
            }
        }
    for (long t = before + 1; t <= before + episodes; t++, uniforms += 3 * L) {
        double root = sqrt((double)t);
        newton(root / gamma, alpha, beta, &stale, &recent, counts);
        stale += 0.5 / t; /* the relative change of the weight until the next episode */
        for (int a = 0; a < A; a++)
            for (int s = 0; s < N; s++) expected += q[a][s] * mean[a][s];
        int s = 0;
        for (int k = 0; k < L; k++) {
            double sum = 0;
            for (int a = 0; a < A; a++) sum += q[a][s];
            int a = draw(&q[0][s], N, A, uniforms[3 * k] * sum);
            if (uniforms[3 * k + 1] < mean[a][s]) loss[a][s] += 1 / q[a][s];
            if (k + 1 < L) s = first(k + 1) + draw(P[a][s], 1, W, uniforms[3 * k + 2]);
        }
    }
    for (int a = 0; a < A; a++)
        for (int s = 0; s < S; s++) start[s * A + a] = q[a][s];
    results[0] = counts[0];
    results[1] = counts[1];
    results[2] = expected;
}
