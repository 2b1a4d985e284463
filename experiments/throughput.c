/* How many elements per second this processor multiplies and adds, divides, or takes roots of,
 * with vectors of BYTES bytes. Each function does `rounds` rounds of COUNT independent vectors
 * and returns a number that depends on all, so that nothing can be left out.
 */
#include <math.h>

#define COUNT 12 /* enough to hide the latency of every instruction */
#define LANES (BYTES / 8)

typedef double lanes __attribute__((vector_size(BYTES)));

static double sum(const lanes *x) {
    double total = 0;
    for (int i = 0; i < COUNT; i++)
        for (int j = 0; j < LANES; j++) total += x[i][j];
    return total;
}

int elements(void) { return COUNT * LANES; }

double fused(long rounds) {
    lanes x[COUNT], factor = (lanes){0} + 0.999, term = (lanes){0} + 0.001;
    for (int i = 0; i < COUNT; i++) x[i] = (lanes){0} + i;
    for (long round = 0; round < rounds; round++)
        for (int i = 0; i < COUNT; i++) x[i] = x[i] * factor + term;
    return sum(x);
}

double division(long rounds) {
    lanes x[COUNT], numerator = (lanes){0} + 3.1;
    for (int i = 0; i < COUNT; i++) x[i] = (lanes){0} + i + 1.3;
    for (long round = 0; round < rounds; round++)
        for (int i = 0; i < COUNT; i++) x[i] = numerator / x[i];
    return sum(x);
}

/* Vectors have no square root in C, so the compiler vectorizes this loop. */
double root(long rounds) {
    double x[COUNT * LANES];
    for (int i = 0; i < COUNT * LANES; i++) x[i] = i + 1.3;
    for (long round = 0; round < rounds; round++) {
        for (int i = 0; i < COUNT * LANES; i++) x[i] = sqrt(x[i]);
        __asm__ volatile("" : : "r"(x) : "memory"); /* keep the rounds in their order */
    }
    double total = 0;
    for (int i = 0; i < COUNT * LANES; i++) total += x[i];
    return total;
}
