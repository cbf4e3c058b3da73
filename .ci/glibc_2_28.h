/* glibc_2_28.h - calls of a wheel, bound to the versions that glibc 2.28 has.
 * A linker takes the newest version of a symbol that its machine offers. The newest ones of these came after 2.28, the glibc
 * that torch's own wheels ask for, and do the same work. Included before every source of a wheel by .ci/wheels.py. */
#if defined(__x86_64__)
#define S1F_BASE "GLIBC_2.2.5"
#define S1F_LATER "GLIBC_2.3.3"
#elif defined(__aarch64__)
#define S1F_BASE "GLIBC_2.17"
#define S1F_LATER "GLIBC_2.17"
#endif

#define S1F_BIND(name, version) __asm__(".symver " #name "," #name "@" version)
S1F_BIND(dlclose, S1F_BASE);
S1F_BIND(dlerror, S1F_BASE);
S1F_BIND(dlinfo, S1F_LATER);
S1F_BIND(dlopen, S1F_BASE);
S1F_BIND(dlsym, S1F_BASE);
S1F_BIND(exp, S1F_BASE);
S1F_BIND(exp2, S1F_BASE);
S1F_BIND(log, S1F_BASE);
S1F_BIND(log2, S1F_BASE);
S1F_BIND(pthread_condattr_setclock, S1F_LATER);
S1F_BIND(pthread_create, S1F_BASE);
S1F_BIND(pthread_join, S1F_BASE);
S1F_BIND(pthread_sigmask, S1F_BASE);
#undef S1F_BIND
