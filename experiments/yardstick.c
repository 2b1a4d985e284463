/* The yardstick of experiments/compiled.py: Jin and Luo's algorithm as one would write it in C, for one size and one regularizer.
 *
 * Warm-started Newton iterations with the O(A) solve in every state and a block-tridiagonal Cholesky factorization of E H^-1 E',
 * sampling along a trajectory, and the importance-weighted update: what the compiled engine does, without its generality (any table of
 * terms, masks, estimators, any size), its certificates and its care for extreme numbers. The sizes are constants, given with
 * -DLAYERS=3 -DWIDTH=3 -DACTIONS=3: one state in the first layer, WIDTH in the others.
 */
#include <math.h>
#include <string.h>

#define L LAYERS
#define W WIDTH
#define A ACTIONS
#define S (1 + (L - 1) * W)

static int first(int k) { return k == 0 ? 0 : 1 + (k - 1) * W; }
static int size(int k) { return k == 0 ? 1 : W; }

typedef struct { double D[A], w[A], d[A], a, e, m, det; } Block;

static void invert(const Block *h, const double *x, double *z) {
    double X = 0, B = 0;
    for (int a = 0; a < A; a++) { double y = x[a] / h->D[a]; X += y; B += h->w[a] * y; }
    double y = (h->e * X + h->a * B) / h->det, k = (h->m * X - h->e * B) / h->det;
    for (int a = 0; a < A; a++) z[a] = (x[a] - k + y * h->w[a]) / h->D[a];
}

/* One step from q, which is overwritten; returns the Newton iterations. P is (S, A, W). */
static int newton(const double *P, const double *loss, double weight, double alpha, double beta, double *q) {
    static Block block[S];
    static double g[S][A], dq[S][A], diagonal[L][W][W], below[L][W][W], rhs[L][W], V[S], one[A], column[W][A], solved[W + 1][A];
    for (int a = 0; a < A; a++) one[a] = 1;
    for (int steps = 1; steps <= 100; steps++) {
        memset(diagonal, 0, sizeof diagonal);
        memset(below, 0, sizeof below);
        memset(rhs, 0, sizeof rhs);
        for (int k = 0; k < L; k++) {
            for (int i = 0; i < size(k); i++) {
                int s = first(k) + i;
                double *x = q + s * A, total = 0, through = 0;
                Block *h = block + s;
                for (int a = 0; a < A; a++) total += x[a];
                h->a = 0; h->e = 1; h->m = 0;
                double slope[A];
                for (int a = 0; a < A; a++) {
                    double rest = total - x[a], r = 1 / x[a], u = 1 / rest, f = 0.5 * weight * r * sqrt(x[a]), o = 0.5 * weight * alpha * u * sqrt(rest);
                    slope[a] = o;
                    through += o;
                    g[s][a] = loss[s * A + a] - f - beta * r;
                    h->d[a] = 0.5 * f * r + beta * r * r;
                    h->w[a] = 0.5 * o * u;
                    h->D[a] = h->d[a] + h->w[a];
                    double v = 1 / h->D[a];
                    h->a += v; h->e -= h->w[a] * v; h->m += h->w[a] * h->d[a] * v;
                }
                for (int a = 0; a < A; a++) g[s][a] -= through - slope[a];
                h->det = h->e * h->e + h->a * h->m;
                double own[A], gradient[A];
                invert(h, one, own);
                invert(h, g[s], gradient);
                for (int a = 0; a < A; a++) { diagonal[k][i][i] += own[a]; rhs[k][i] += gradient[a] - x[a]; }
                if (k + 1 < L)
                    for (int j = 0; j < W; j++) {
                        for (int a = 0; a < A; a++) column[j][a] = P[(s * A + a) * W + j];
                        invert(h, column[j], solved[j]);
                        double cross = 0, flow = 0;
                        for (int a = 0; a < A; a++) { cross += solved[j][a]; flow += column[j][a] * (gradient[a] - x[a]); }
                        below[k + 1][j][i] -= cross;
                        rhs[k + 1][j] -= flow;
                        for (int b = 0; b <= j; b++) {
                            double sum = 0;
                            for (int a = 0; a < A; a++) sum += column[b][a] * solved[j][a];
                            diagonal[k + 1][j][b] += sum;
                        }
                    }
            }
        }
        rhs[0][0] += 1;
        for (int k = 0; k < L; k++) { /* Cholesky, and the forward substitution on the way */
            int n = size(k), m = k ? size(k - 1) : 0;
            if (k) {
                for (int i = 0; i < n; i++)
                    for (int j = 0; j < m; j++) {
                        double sum = below[k][i][j];
                        for (int b = 0; b < j; b++) sum -= below[k][i][b] * diagonal[k - 1][j][b];
                        below[k][i][j] = sum / diagonal[k - 1][j][j];
                    }
                for (int i = 0; i < n; i++) {
                    for (int j = 0; j <= i; j++) {
                        double sum = 0;
                        for (int b = 0; b < m; b++) sum += below[k][i][b] * below[k][j][b];
                        diagonal[k][i][j] -= sum;
                    }
                    for (int b = 0; b < m; b++) rhs[k][i] -= below[k][i][b] * rhs[k - 1][b];
                }
            }
            for (int i = 0; i < n; i++) {
                for (int j = 0; j <= i; j++) {
                    double sum = diagonal[k][i][j];
                    for (int b = 0; b < j; b++) sum -= diagonal[k][i][b] * diagonal[k][j][b];
                    diagonal[k][i][j] = i == j ? sqrt(sum) : sum / diagonal[k][j][j];
                }
                for (int b = 0; b < i; b++) rhs[k][i] -= diagonal[k][i][b] * rhs[k][b];
                rhs[k][i] /= diagonal[k][i][i];
            }
        }
        for (int k = L - 1; k >= 0; k--) {
            int n = size(k);
            for (int i = n - 1; i >= 0; i--) {
                double sum = rhs[k][i];
                if (k + 1 < L) for (int b = 0; b < W; b++) sum -= below[k + 1][b][i] * V[first(k + 1) + b];
                for (int b = i + 1; b < n; b++) sum -= diagonal[k][b][i] * V[first(k) + b];
                V[first(k) + i] = sum / diagonal[k][i][i];
            }
        }
        double moved = 0, fall = 0;
        for (int k = 0; k < L; k++)
            for (int s = first(k); s < first(k) + size(k); s++) {
                double x[A];
                for (int a = 0; a < A; a++) {
                    x[a] = V[s] - g[s][a];
                    if (k + 1 < L) for (int j = 0; j < W; j++) x[a] -= P[(s * A + a) * W + j] * V[first(k + 1) + j];
                }
                invert(block + s, x, dq[s]);
                for (int a = 0; a < A; a++) {
                    double change = dq[s][a] / q[s * A + a];
                    moved = fmax(moved, fabs(change));
                    fall = fmax(fall, -change);
                }
            }
        double length = fall <= 0.5 ? 1 : 1 / (1 + fall);
        for (int s = 0; s < S; s++) for (int a = 0; a < A; a++) q[s * A + a] += length * dq[s][a];
        if (moved <= 1.5e-8) return steps;
    }
    return 100;
}

static int draw(const double *p, int n, double uniform) {
    int i = 0;
    for (; i < n - 1 && uniform >= p[i]; i++) uniform -= p[i];
    return i;
}

/* Episodes before + 1, ..., before + episodes from given uniforms (episodes, L, 3). Returns the mean number of Newton iterations; the
 * expected loss is added to *expected. */
double play(const double *P, const double *mean, const double *uniforms, long before, long episodes, double alpha, double beta,
            double gamma, double *q, double *loss, double *expected) {
    long steps = 0;
    for (long t = before + 1; t <= before + episodes; t++, uniforms += 3 * L) {
        steps += newton(P, loss, sqrt((double)t) / gamma, alpha, beta, q);
        for (int i = 0; i < S * A; i++) *expected += q[i] * mean[i];
        int s = 0;
        for (int k = 0; k < L; k++) {
            double policy[A], total = 0;
            for (int a = 0; a < A; a++) total += q[s * A + a];
            for (int a = 0; a < A; a++) policy[a] = q[s * A + a] / total;
            int a = draw(policy, A, uniforms[3 * k]);
            if (uniforms[3 * k + 1] < mean[s * A + a]) loss[s * A + a] += 1 / q[s * A + a];
            if (k + 1 < L) s = first(k + 1) + draw(P + (s * A + a) * W, W, uniforms[3 * k + 2]);
        }
    }
    return (double)steps / episodes;
}
