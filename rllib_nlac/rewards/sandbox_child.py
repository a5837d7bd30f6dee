"""Runs one program after giving up every right that it does not need. Stand-alone: only the standard library, one argument.

The argument is a JSON file: ``program`` (a file), ``call`` (a function and its arguments, or null), ``folder`` (the only place
to write), ``state`` (a file that is empty once the program runs, and else says why it does not), ``parent`` (whose end ends
this), ``memory_bytes``, ``cpu_s``, ``file_bytes``. Landlock takes the file system away but for Python itself and the folder. A
seccomp filter lists the system calls that are left; all others fail. Without either it does not start.
"""

import builtins
import contextlib
import ctypes
import json
import os
import resource
import struct
import sys
import types
from typing import Any, NoReturn, TextIO

REFUSED = 77  # exit status where the kernel does not offer what is needed

# System calls that are left, by architecture: reading, writing, memory, time, threads. What is not here fails with EPERM.
_X86_64 = {
    "read": 0,
    "write": 1,
    "close": 3,
    "stat": 4,
    "fstat": 5,
    "lstat": 6,
    "poll": 7,
    "lseek": 8,
    "mmap": 9,
    "mprotect": 10,
    "munmap": 11,
    "brk": 12,
    "rt_sigaction": 13,
    "rt_sigprocmask": 14,
    "rt_sigreturn": 15,
    "pread64": 17,
    "pwrite64": 18,
    "readv": 19,
    "writev": 20,
    "access": 21,
    "pipe": 22,
    "select": 23,
    "sched_yield": 24,
    "mremap": 25,
    "msync": 26,
    "mincore": 27,
    "madvise": 28,
    "dup": 32,
    "dup2": 33,
    "pause": 34,
    "nanosleep": 35,
    "getitimer": 36,
    "alarm": 37,
    "setitimer": 38,
    "getpid": 39,
    "sendfile": 40,
    "exit": 60,
    "uname": 63,
    "fsync": 74,
    "fdatasync": 75,
    "ftruncate": 77,
    "getdents": 78,
    "getcwd": 79,
    "chdir": 80,
    "fchdir": 81,
    "readlink": 89,
    "umask": 95,
    "gettimeofday": 96,
    "getrlimit": 97,
    "getrusage": 98,
    "sysinfo": 99,
    "times": 100,
    "getuid": 102,
    "getgid": 104,
    "geteuid": 107,
    "getegid": 108,
    "getppid": 110,
    "getpgrp": 111,
    "getgroups": 115,
    "getresuid": 118,
    "getresgid": 120,
    "rt_sigpending": 127,
    "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130,
    "sigaltstack": 131,
    "statfs": 137,
    "fstatfs": 138,
    "gettid": 186,
    "time": 201,
    "futex": 202,
    "sched_getaffinity": 204,
    "epoll_create": 213,
    "getdents64": 217,
    "set_tid_address": 218,
    "restart_syscall": 219,
    "fadvise64": 221,
    "clock_gettime": 228,
    "clock_getres": 229,
    "clock_nanosleep": 230,
    "exit_group": 231,
    "epoll_wait": 232,
    "epoll_ctl": 233,
    "newfstatat": 262,
    "readlinkat": 267,
    "faccessat": 269,
    "pselect6": 270,
    "ppoll": 271,
    "set_robust_list": 273,
    "get_robust_list": 274,
    "epoll_pwait": 281,
    "eventfd2": 290,
    "epoll_create1": 291,
    "dup3": 292,
    "pipe2": 293,
    "preadv": 295,
    "pwritev": 296,
    "getcpu": 309,
    "getrandom": 318,
    "copy_file_range": 326,
    "statx": 332,
    "rseq": 334,
    "faccessat2": 439,
}
_AARCH64 = {
    "getcwd": 17,
    "eventfd2": 19,
    "epoll_create1": 20,
    "epoll_ctl": 21,
    "epoll_pwait": 22,
    "dup": 23,
    "dup3": 24,
    "statfs": 43,
    "fstatfs": 44,
    "ftruncate": 46,
    "faccessat": 48,
    "chdir": 49,
    "fchdir": 50,
    "close": 57,
    "pipe2": 59,
    "getdents64": 61,
    "lseek": 62,
    "read": 63,
    "write": 64,
    "readv": 65,
    "writev": 66,
    "pread64": 67,
    "pwrite64": 68,
    "preadv": 69,
    "pwritev": 70,
    "sendfile": 71,
    "pselect6": 72,
    "ppoll": 73,
    "readlinkat": 78,
    "newfstatat": 79,
    "fstat": 80,
    "fsync": 82,
    "fdatasync": 83,
    "exit": 93,
    "exit_group": 94,
    "set_tid_address": 96,
    "futex": 98,
    "set_robust_list": 99,
    "get_robust_list": 100,
    "nanosleep": 101,
    "getitimer": 102,
    "setitimer": 103,
    "clock_gettime": 113,
    "clock_getres": 114,
    "clock_nanosleep": 115,
    "sched_getaffinity": 123,
    "sched_yield": 124,
    "restart_syscall": 128,
    "sigaltstack": 132,
    "rt_sigsuspend": 133,
    "rt_sigaction": 134,
    "rt_sigprocmask": 135,
    "rt_sigpending": 136,
    "rt_sigtimedwait": 137,
    "rt_sigreturn": 139,
    "getresuid": 148,
    "getresgid": 150,
    "times": 153,
    "getgroups": 158,
    "uname": 160,
    "getrlimit": 163,
    "getrusage": 165,
    "umask": 166,
    "getcpu": 168,
    "gettimeofday": 169,
    "getpid": 172,
    "getppid": 173,
    "getuid": 174,
    "geteuid": 175,
    "getgid": 176,
    "getegid": 177,
    "gettid": 178,
    "sysinfo": 179,
    "brk": 214,
    "munmap": 215,
    "mremap": 216,
    "mmap": 222,
    "fadvise64": 223,
    "mprotect": 226,
    "msync": 227,
    "mincore": 232,
    "madvise": 233,
    "getrandom": 278,
    "copy_file_range": 285,
    "statx": 291,
    "rseq": 293,
    "faccessat2": 439,
}
# Those whose arguments matter: open (none on ARM64), openat, fcntl, ioctl, clone, prlimit64.
_ARCHITECTURES = {
    "x86_64": (0xC000003E, _X86_64, {"open": 2, "openat": 257, "fcntl": 72, "ioctl": 16, "clone": 56, "prlimit64": 302}),
    "aarch64": (0xC00000B7, _AARCH64, {"openat": 56, "fcntl": 25, "ioctl": 29, "clone": 220, "prlimit64": 261}),
}
_NEWER = 424  # these numbers are the same everywhere, and the C library does without them where they are unknown
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000

_libc = ctypes.CDLL(None, use_errno=True)
_Line = tuple[int, int, int, int]


class Refused(Exception):
    """The kernel does not offer what is needed."""


def _one_of(argument: int, values: tuple[int, ...]) -> list[_Line]:
    """Allows a call whose argument, counted from 0, is one of these values."""
    tests = [(_EQUAL, len(values) - number, 0, value) for number, value in enumerate(values)]
    return [(_LOAD, 0, 0, 16 + 8 * argument), *tests, (_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]


def _open_flags(argument: int) -> list[_Line]:
    """Allows opening but for nameless files, which no one counts, and for truncating what is opened to read."""
    tmpfile, truncate, access = 0x400000, 0x200, 0x3
    return [
        (_LOAD, 0, 0, 16 + 8 * argument),
        (_ANY_BIT, 3, 0, tmpfile),
        (_AND, 0, 0, truncate | access),
        (_EQUAL, 1, 0, truncate),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _EPERM),
    ]


def _guarded() -> dict[str, list[_Line]]:
    """What is asked of the arguments of a call."""
    thread, namespaces = 0x00010000, 0x7E020080
    return {
        "open": _open_flags(1),
        "openat": _open_flags(2),
        # No owner of a file's signals (F_SETOWN, F_SETSIG): they reach any process of the same user.
        "fcntl": _one_of(1, (0, 1, 2, 3, 4, 5, 6, 7, 1030)),
        # No flags of a file system, such as "immutable": is it a terminal, how wide, close on exec, bytes to read.
        "ioctl": _one_of(1, (0x5401, 0x5413, 0x5450, 0x5451, 0x541B)),
        "clone": [
            (_LOAD, 0, 0, 16),
            (_ANY_BIT, 0, 2, thread),
            (_ANY_BIT, 1, 0, namespaces),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _EPERM),
        ],
        # May read limits, not set them: the third argument, of 64 bits, must be null.
        "prlimit64": [
            (_LOAD, 0, 0, 32),
            (_EQUAL, 0, 3, 0),
            (_LOAD, 0, 0, 36),
            (_EQUAL, 0, 1, 0),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _EPERM),
        ],
    }


def deny_system_calls() -> None:
    """A seccomp filter: no network, no processes (threads are allowed), no signals, no rights, no settings.

    Raises:
        Refused: There are no seccomp filters, or no list for this machine.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise Refused(f"an x86-64 or ARM64 machine, and this is {machine}")
    audit, allowed, guarded = _ARCHITECTURES[machine]
    program: list[_Line] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for number in allowed.values():
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    bodies = _guarded()
    for name, number in guarded.items():
        program += [(_EQUAL, 0, len(bodies[name]), number), *bodies[name]]
    program += [(_AT_LEAST, 0, 1, _NEWER), (_RETURN, 0, 0, _ENOSYS), (_RETURN, 0, 0, _EPERM)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    if _libc.prctl(38, 1, 0, 0, 0) or _libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0):
        raise Refused("seccomp filters (prctl PR_SET_SECCOMP)")


def deny_files(folder: str | None, readable: list[str]) -> None:
    """Landlock: what is ``readable`` can be read, plain files of ``folder`` can be written, nothing else can be opened.

    In the folder there are no links, devices or folders: it stays flat, so that it can be measured and removed. Nothing in it
    is removed or renamed: a file that is still open or mapped would take up room where no one counts it.

    Raises:
        Refused: The kernel has no Landlock.
    """
    version = _libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        raise Refused("Landlock (Linux 5.13 or newer, allowed by the container)")
    write, read, list_folder, make_file, truncate = 1 << 1, 1 << 2, 1 << 3, 1 << 8, 1 << 14
    newer = (1 << 13 if version >= 2 else 0) | (truncate if version >= 3 else 0) | (1 << 15 if version >= 5 else 0)
    rights = (1 << 13) - 1 | newer
    attributes = struct.pack("Q", rights)
    attributes += struct.pack("Q", 3) if version >= 4 else b""  # TCP: bind and connect
    attributes += struct.pack("Q", 3) if version >= 6 else b""  # abstract sockets and signals to processes outside
    ruleset = _libc.syscall(444, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    rules = dict.fromkeys([*readable, "/etc/ld.so.cache", "/dev/urandom"], read | list_folder)
    rules["/dev/null"] = read | write
    if folder is not None:
        rules[folder] = rights & (write | read | list_folder | make_file | truncate)
    for path, wanted in rules.items():
        if not os.path.exists(path):
            continue
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", wanted if os.path.isdir(path) else wanted & (read | write), handle)
        if _libc.syscall(445, ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.c_char_p(rule), ctypes.c_uint32(0)):
            raise Refused(f"a Landlock rule for {path}: {os.strerror(ctypes.get_errno())}")
        os.close(handle)
    if _libc.prctl(38, 1, 0, 0, 0) or _libc.syscall(446, ctypes.c_int(ruleset), ctypes.c_uint32(0)):
        raise Refused("Landlock (landlock_restrict_self)")
    os.close(ruleset)


def libraries() -> list[str]:
    """Where Python's standard library and the shared libraries that it loads are."""
    shared = [f"{sys.base_prefix}/lib", "/usr/lib", "/usr/lib64", "/lib", "/lib64"]
    return [*sys.path, *shared, "/usr/share/zoneinfo"]


def drop_rights() -> None:
    """Root becomes nobody special: of its capabilities only that to read is left, which Landlock bounds."""
    header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    if _libc.capget(ctypes.c_char_p(header), data):
        raise Refused("capget")
    kept = struct.unpack("6I", data.raw)[1] & (1 << 2)  # CAP_DAC_READ_SEARCH, to reach Python in somebody else's folder
    if _libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(struct.pack("6I", kept, kept, 0, 0, 0, 0))):
        raise Refused("capset")


def end_with(parent: int) -> None:
    """Nothing outlives the process that started it, leaves a core dump, or is spared where memory runs out."""
    _libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(REFUSED)
    _libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no core dump, not to a program that collects them either
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def limit(memory_bytes: int, cpu_s: int, file_bytes: int) -> None:
    """Memory, time, the size and number of files."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
    }
    for which, value in limits.items():
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def _restrict(settings: dict[str, Any]) -> None:
    if sys.platform != "linux":
        raise Refused(f"Linux, and this is {sys.platform}")
    end_with(settings["parent"])
    limit(settings["memory_bytes"], settings["cpu_s"], settings["file_bytes"])
    drop_rights()
    deny_files(settings["folder"], libraries())
    deny_system_calls()


def confine(memory_bytes: int) -> None:
    """For a worker that runs a library on anyone's texts: a limit of memory, and as few rights as the kernel can take away."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with contextlib.suppress(Refused):  # a library is no stranger's program; the limit of memory remains
        drop_rights()
        deny_files(None, [*libraries(), sys.prefix])
        deny_system_calls()


def _refuse(state: TextIO, reason: str) -> NoReturn:
    state.truncate(0)
    state.write(f"the sandbox needs {reason}")
    state.close()
    os._exit(REFUSED)


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        settings = json.load(file)
    with open(settings["program"], encoding="utf-8") as file:
        source = file.read()
    os.chdir(settings["folder"])
    with open(settings["state"], "r+", encoding="utf-8") as state:  # the program cannot open it: its folder is another
        try:
            _restrict(settings)
        except Refused as refused:
            _refuse(state, str(refused))
        state.truncate(0)
    # A program may end by them, and without the module `site` nobody made them.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    module = types.ModuleType("__main__")  # in which pickle and dataclasses look for the program's classes
    scope, sys.modules["__main__"], sys.argv = vars(module), module, ["program.py"]
    exec(compile(source, "program.py", "exec"), scope)
    if settings["call"] is not None:
        name, arguments = settings["call"]
        function = scope[name] if name in scope else getattr(scope["Solution"](), name)
        print("\n" + json.dumps(function(*arguments)))


if __name__ == "__main__":
    main()
