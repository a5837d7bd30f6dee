"""Runs one program after giving up every right that it does not need. Stand-alone: only the standard library, one argument.

The argument is JSON: ``program`` (a file), ``call`` (a function and its arguments, or null), ``folder`` (the only place to
write), ``memory_bytes``, ``cpu_s``, ``file_bytes``. Landlock takes the file system away but for Python itself and the folder,
a seccomp filter takes away the network, other processes and the system's settings. Without either it does not start.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from typing import Any

REFUSED = 77  # exit status where the kernel does not offer what is needed

# System calls that fail with EPERM, by architecture.
_DENIED_X86_64 = {
    "socket": 41, "connect": 42, "socketpair": 53, "bind": 49, "fork": 57, "vfork": 58, "execve": 59, "execveat": 322,
    "kill": 62, "tkill": 200, "tgkill": 234, "pidfd_send_signal": 424, "pidfd_open": 434, "ptrace": 101,
    "process_vm_readv": 310, "process_vm_writev": 311, "setrlimit": 160, "chmod": 90, "fchmod": 91, "chown": 92,
    "fchown": 93, "lchown": 94, "fchownat": 260, "fchmodat": 268, "fchmodat2": 452, "mount": 165, "umount2": 166,
    "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308, "reboot": 169, "sethostname": 170, "setdomainname": 171,
    "settimeofday": 164, "clock_settime": 227, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "kexec_load": 246, "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425, "userfaultfd": 323, "keyctl": 250,
    "add_key": 248, "request_key": 249, "swapon": 167, "swapoff": 168, "setuid": 105, "setpriority": 141,
    "sched_setaffinity": 203, "setxattr": 188, "removexattr": 197, "utimensat": 280, "shmget": 29, "msgget": 68,
}  # fmt: skip
_DENIED_AARCH64 = {
    "socket": 198, "connect": 203, "socketpair": 199, "bind": 200, "execve": 221, "execveat": 281, "kill": 129,
    "tkill": 130, "tgkill": 131, "pidfd_send_signal": 424, "pidfd_open": 434, "ptrace": 117, "process_vm_readv": 270,
    "process_vm_writev": 271, "setrlimit": 164, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55,
    "fchmodat2": 452, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268,
    "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "clock_settime": 112, "init_module": 105,
    "finit_module": 273, "delete_module": 106, "kexec_load": 104, "bpf": 280, "perf_event_open": 241, "io_uring_setup": 425,
    "userfaultfd": 282, "keyctl": 219, "add_key": 217, "request_key": 218, "swapon": 224, "swapoff": 225, "setuid": 146,
    "setpriority": 140, "sched_setaffinity": 122, "setxattr": 5, "removexattr": 14, "utimensat": 88, "shmget": 194,
    "msgget": 186,
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0xC000003E, _DENIED_X86_64, 56, 302), "aarch64": (0xC00000B7, _DENIED_AARCH64, 220, 261)}
_CLONE3 = 435
_CLONE_THREAD = 0x00010000

_libc = ctypes.CDLL(None, use_errno=True)


def _refuse(what: str) -> None:
    print(f"the sandbox needs {what}", file=sys.stderr)
    sys.exit(REFUSED)


def deny_system_calls() -> None:
    """A seccomp filter: no network, no processes (threads are allowed), no signals, no rights, no settings."""
    if platform.machine() not in _ARCHITECTURES:
        _refuse(f"an x86-64 or ARM64 machine, and this is {platform.machine()}")
    audit, denied, clone, prlimit = _ARCHITECTURES[platform.machine()]
    load, jump_eq, jump_ge, jump_set, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, eperm, enosys, kill = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000
    program = [(load, 0, 0, 4), (jump_eq, 1, 0, audit), (ret, 0, 0, kill), (load, 0, 0, 0)]
    program += [(jump_ge, 0, 1, 0x40000000), (ret, 0, 0, eperm)]  # the x32 numbers
    for number in sorted(denied.values()):
        program += [(jump_eq, 0, 1, number), (ret, 0, 0, eperm)]
    program += [(jump_eq, 0, 1, _CLONE3), (ret, 0, 0, enosys)]  # the C library falls back to clone, whose flags can be read
    program += [
        (jump_eq, 0, 4, clone),
        (load, 0, 0, 16),
        (jump_set, 1, 0, _CLONE_THREAD),
        (ret, 0, 0, eperm),
        (ret, 0, 0, allow),
    ]
    program += [  # prlimit may read limits, not set them: its third argument must be null
        (jump_eq, 0, 6, prlimit), (load, 0, 0, 32), (jump_eq, 0, 2, 0), (load, 0, 0, 36), (jump_eq, 1, 0, 0),
        (ret, 0, 0, eperm), (ret, 0, 0, allow),
    ]  # fmt: skip
    program += [(ret, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    if _libc.prctl(38, 1, 0, 0, 0) or _libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0):
        _refuse("seccomp filters (prctl PR_SET_SECCOMP)")


def deny_files(folder: str) -> None:
    """Landlock: Python and its libraries can be read, ``folder`` can be written, and nothing else is there."""
    version = _libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        _refuse("Landlock (Linux 5.13 or newer, allowed by the container)")
    rights = (
        (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0) | (1 << 15 if version >= 5 else 0)
    )
    attributes = struct.pack("Q", rights)
    ruleset = _libc.syscall(444, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    read = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a folder
    file_only = 1 << 0 | 1 << 1 | 1 << 2
    allowed = dict.fromkeys({sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom"}, read)
    allowed |= {"/dev/null": 1 << 1 | 1 << 2, folder: rights & ~(1 << 0)}
    for path, wanted in allowed.items():
        if not os.path.exists(path):
            continue
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", wanted if os.path.isdir(path) else wanted & file_only, handle)
        if _libc.syscall(445, ctypes.c_int(ruleset), ctypes.c_int(1), ctypes.c_char_p(rule), ctypes.c_uint32(0)):
            _refuse(f"a Landlock rule for {path}: {os.strerror(ctypes.get_errno())}")
        os.close(handle)
    if _libc.prctl(38, 1, 0, 0, 0) or _libc.syscall(446, ctypes.c_int(ruleset), ctypes.c_uint32(0)):
        _refuse("Landlock (landlock_restrict_self)")
    os.close(ruleset)


def limit(settings: dict[str, Any]) -> None:
    """Memory, time, the size and number of files."""
    limits = {
        resource.RLIMIT_AS: settings["memory_bytes"], resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_FSIZE: settings["file_bytes"], resource.RLIMIT_NOFILE: 64, resource.RLIMIT_CORE: 0,
    }  # fmt: skip
    for which, value in limits.items():
        resource.setrlimit(which, (value, value))


def main() -> None:
    if sys.platform != "linux":
        _refuse(f"Linux, and this is {sys.platform}")
    settings = json.loads(sys.argv[1])
    with open(settings["program"], encoding="utf-8") as file:
        source = file.read()
    os.chdir(settings["folder"])
    limit(settings)
    deny_files(settings["folder"])
    deny_system_calls()
    scope: dict[str, Any] = {"__name__": "__main__"}
    sys.argv = ["program.py"]
    exec(compile(source, "program.py", "exec"), scope)
    if settings["call"] is not None:
        name, arguments = settings["call"]
        function = scope[name] if name in scope else getattr(scope["Solution"](), name)
        print("\n" + json.dumps(function(*arguments)))


if __name__ == "__main__":
    main()
