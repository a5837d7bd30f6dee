"""Programs that attack the sandbox, each with the reason why it fails. One that breaks out prints what its test wants to see.

In a program ``VICTIM`` is the id of another process of the same user, ``SECRET`` a file that it may not read, ``PORT`` a
service that listens, ``PARENT`` the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OUT = "BROKE OUT"
NO_CALL = "seccomp: the system call is not among those that are left"
NO_FILE = "Landlock: only Python's libraries and the work folder can be opened"
FLAT = "Landlock: the work folder takes plain files only"
TIME = "the trainer ends its process group after the time limit"
LIMIT = "rlimit: memory, size of a file, open files; or the time limit, where that comes first"
COUNTED = "the trainer counts files and threads, and ends it"
OUTSIDE = "the right answers are never in its process: the trainer compares"
EMPTY = "its environment has two variables, none of them the trainer's"

SHOW = {"inputs": [""], "outputs": [OUT]}
DOUBLE = {"fn_name": "f", "inputs": [[1], [7919]], "outputs": [2, 1600211939]}  # not twice: no program can guess the second
PRELUDE = """\
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *rest):
    result = libc.syscall(x86 if os.uname().machine == 'x86_64' else arm, *rest)
    if result < 0: raise OSError(ctypes.get_errno(), 'syscall')
    return result
"""


@dataclass(frozen=True)
class Program:
    """One attack.

    Attributes:
        name: What it tries.
        why: Why it fails.
        source: What it runs after ``PRELUDE``.
        truth: The tests that it must not pass; by default it passes by printing ``OUT``.
    """

    name: str
    why: str
    source: str
    truth: dict[str, Any] = field(default_factory=lambda: SHOW)


def _out(name: str, why: str, source: str) -> Program:
    """A program that has broken out if it comes to its end."""
    return Program(name, why, f"{source}\nprint({OUT!r})")


PROCESSES = (
    _out("fork bomb", NO_CALL, "while os.fork() >= 0: pass"),
    _out("fork once", NO_CALL, "os.fork()"),
    _out("double fork and setsid", NO_CALL, "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    while True: pass"),
    _out("posix_spawn", NO_CALL, "os.posix_spawn('/bin/sleep', ['sleep', '60'], {})"),
    _out("shell", NO_CALL, "import subprocess; subprocess.Popen('sleep 60', shell=True)"),
    _out("exec", NO_CALL, "os.execv('/bin/echo', ['echo', 'BROKE OUT'])"),
    _out("multiprocessing", NO_CALL, "import multiprocessing as m; p = m.Process(target=print); p.start()"),
    _out("clone without the C library", "seccomp: clone makes threads only", "call(56, 220, 17, 0, 0, 0, 0)"),
    _out("clone3 without the C library", NO_CALL, "call(435, 435, ctypes.create_string_buffer(88), 88)"),
    _out("a new user namespace", NO_CALL, "call(272, 97, 0x10000000)"),
    _out(
        "thread bomb",
        COUNTED,
        "import threading, time\nthreading.stack_size(32768)\nwhile threading.active_count() < 3000:\n"
        "  threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
    ),
    _out("setsid, to leave the process group", NO_CALL, "os.setsid()"),
    _out("setpgid, to leave the process group", NO_CALL, "os.setpgid(0, 0)"),
    _out("outliving a dead trainer (PR_SET_PDEATHSIG)", NO_CALL, "call(157, 167, 1, 0, 0, 0, 0)"),
)

SIGNALS = (
    _out("kill the trainer", NO_CALL, "os.kill(PARENT, 9)"),
    _out("kill another process", NO_CALL, "os.kill(VICTIM, 9)"),
    _out("signal to the process group", NO_CALL, "os.killpg(0, 9)"),
    _out("signal to everyone", NO_CALL, "os.kill(-1, 9)"),
    _out("tgkill", NO_CALL, "call(234, 131, VICTIM, VICTIM, 9)"),
    _out("rt_sigqueueinfo", NO_CALL, "import struct\ncall(129, 138, VICTIM, 9, struct.pack('iii', 9, 0, -1) + bytes(116))"),
    _out(
        "rt_tgsigqueueinfo",
        NO_CALL,
        "import struct\ncall(297, 240, VICTIM, VICTIM, 9, struct.pack('iii', 9, 0, -1) + bytes(116))",
    ),
    _out(
        "SIGKILL as the signal of a pipe (F_SETOWN, F_SETSIG)",
        "seccomp: fcntl sets no owner",
        "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, 8, VICTIM)\nfcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')",
    ),
    _out("pidfd", NO_CALL, "call(424, 424, call(434, 434, VICTIM, 0), 9, 0, 0)"),
    _out("ptrace", NO_CALL, "call(101, 117, 0x4206, VICTIM, 0, 0)"),
    _out("write another's memory", NO_CALL, "call(311, 271, VICTIM, 0, 0, 0, 0, 0)"),
    _out("read another's memory", NO_CALL, "call(310, 270, VICTIM, 0, 0, 0, 0, 0)"),
    _out("the trainer's memory in /proc", NO_FILE, "open(f'/proc/{PARENT}/mem', 'rb')"),
    _out("another's scheduling", NO_CALL, "os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))"),
    _out("another's priority", NO_CALL, "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)"),
    _out("another's processors", NO_CALL, "os.sched_setaffinity(VICTIM, [0])"),
    _out("another's disk priority", NO_CALL, "call(251, 30, 1, VICTIM, 3 << 13)"),
    _out(
        "another's limits",
        "seccomp: prlimit64 reads only",
        "import resource; resource.prlimit(VICTIM, resource.RLIMIT_NOFILE, (0, 0))",
    ),
)

LIMITS = (
    _out("memory at once", LIMIT, "x = bytearray(10**10)"),
    _out("memory by and by", LIMIT, "x = []\nwhile True: x.append(bytearray(10**7))"),
    _out("higher limits", NO_CALL, "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    _out(
        "higher limits by prlimit64",
        "seccomp: prlimit64 reads only",
        "call(302, 261, 0, 9, ctypes.create_string_buffer(b'\\xff' * 16), 0)",
    ),
    _out("a loop", TIME, "while True: pass"),
    _out("a long sleep", TIME, "import time; time.sleep(10**6)"),
    _out(
        "ignoring all signals",
        TIME,
        "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\n"
        "while True: pass",
    ),
    _out("catching SystemExit for ever", TIME, "while True:\n  try: sys.exit()\n  except BaseException: pass"),
    _out("a regular expression that never ends", TIME, "import re; re.match('(a+)+b', 'a' * 60)"),
    _out("a power that never ends", TIME, "9 ** 9 ** 9 ** 9"),
    _out(
        "recursion without end",
        "Python's own limit, or a crash of its own process",
        "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    ),
    _out("a crash", "it is a process of its own", "ctypes.string_at(0)"),
    _out("abort, for a core dump", "PR_SET_DUMPABLE and RLIMIT_CORE are 0", "os.abort()"),
    _out("core dumps switched on", NO_CALL, "call(157, 167, 4, 1, 0, 0, 0)"),
    _out("output without end", LIMIT, "while True: print('x' * 10**5)"),
    _out("errors without end", LIMIT, "while True: sys.stderr.write('x' * 10**5)"),
    _out("one large file", LIMIT, "f = open('a', 'wb')\nwhile True: f.write(b'x' * 10**6)"),
    _out("a file's room without writing it", NO_CALL, "os.posix_fallocate(os.open('a', os.O_RDWR | os.O_CREAT), 0, 1 << 20)"),
    _out("many large files", COUNTED, "for i in range(60): open(str(i), 'wb').write(b'x' * (7 << 20))"),
    _out(
        "removed files that stay mapped, which no one counts",
        NO_CALL,
        "import mmap\nm = []\nfor i in range(12):\n  with open('a', 'wb+') as f:\n    f.write(bytes(7 << 20))\n"
        "    m.append(mmap.mmap(f.fileno(), 4096))\n  os.unlink('a')",
    ),
    _out(
        "files written over, which stay mapped",
        NO_CALL,
        "import mmap\nm = []\nfor i in range(12):\n  with open('b', 'wb+') as f:\n    f.write(bytes(7 << 20))\n"
        "    m.append(mmap.mmap(f.fileno(), 4096))\n  os.replace('b', 'a')",
    ),
    _out("many small files", COUNTED, "for i in range(10**6): open(str(i), 'w').close()"),
    _out("open files", LIMIT, "fs = [open('a', 'w') for i in range(40)]"),
    _out("nameless files", "seccomp: no O_TMPFILE", "os.open('.', os.O_TMPFILE | os.O_RDWR)"),
    _out("files in memory", NO_CALL, "os.memfd_create('a')"),
    _out("a zip bomb", LIMIT, "import zlib\nz = zlib.compress(bytes(10**8), 9)\nx = [zlib.decompress(z) for i in range(9)]"),
)

FILES = (
    Program("the trainer's variables", EMPTY, "print(os.environ['ATTACK_SECRET'])"),
    Program("its own /proc/self/environ", NO_FILE, "print(open('/proc/self/environ').read())"),
    Program(
        "the trainer's /proc/PID/environ",
        NO_FILE,
        "print(open(f'/proc/{PARENT}/environ').read().split('ATTACK_SECRET=')[1].split(chr(0))[0])",
    ),
    Program(
        "variables on the stack",
        EMPTY,
        "e = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')\ni = 0\n"
        "while e[i]:\n  if b'ATTACK' in e[i]: print(e[i].split(b'=')[1].decode())\n  i += 1",
    ),
    Program("a file of the user", NO_FILE, "print(open(SECRET).read())"),
    Program("a file by way of ..", NO_FILE, "print(open('../' * 20 + SECRET).read())"),
    Program("a file by a symbolic link", FLAT, "os.symlink(SECRET, 'a'); print(open('a').read())"),
    Program("a file by a hard link", NO_FILE, "os.link(SECRET, 'a'); print(open('a').read())"),
    Program(
        "a file by its handle",
        NO_CALL,
        "b = ctypes.create_string_buffer(136)\nb[0] = 128\nm = ctypes.c_int()\n"
        "call(303, 264, -100, SECRET.encode(), b, ctypes.byref(m), 0)\nd = os.open('.', os.O_RDONLY)\n"
        "print(os.read(call(304, 265, d, b, 0), 99).decode())",
    ),
    Program("a file by io_uring", NO_CALL, "call(425, 425, 8, ctypes.create_string_buffer(120)); print(open(SECRET).read())"),
    _out("a list of the user's files", NO_FILE, "os.listdir(os.path.dirname(SECRET))"),
    _out("what lies beside its folder", NO_FILE, "os.listdir('..')"),
    _out("its own program's folder", NO_FILE, "open('../settings.json')"),
    _out("/etc/passwd", NO_FILE, "open('/etc/passwd')"),
    _out("/etc/shadow", NO_FILE, "open('/etc/shadow')"),
    _out("a file of the project", NO_FILE, "open(PROJECT)"),
    _out("the packages beside Python", "without site (-I -S) they are on no path", "import numpy"),
    _out("overwrite a file", NO_FILE, "open(SECRET, 'w')"),
    _out("remove a file", NO_CALL, "os.remove(SECRET)"),
    _out("rename a file", NO_CALL, "os.rename(SECRET, 'mine')"),
    _out("truncate a file", NO_CALL, "os.truncate(SECRET, 0)"),
    _out(
        "truncate a library while opening it to read",
        "seccomp: no O_TRUNC without writing",
        "os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
    ),
    _out("a module among Python's own", NO_FILE, "open(os.path.join(os.path.dirname(os.__file__), 'sitecustomize.py'), 'w')"),
    _out("rights of a file", NO_CALL, "os.chmod(SECRET, 0)"),
    _out("owner of a file", NO_CALL, "os.chown(SECRET, 1, 1)"),
    _out("times of a file", NO_CALL, "os.utime(SECRET)"),
    _out("attributes of a file", NO_CALL, "os.setxattr('/dev/null', 'user.a', b'b')"),
    _out(
        "a file that cannot be removed (immutable)",
        "seccomp: ioctl only asks of terminals",
        "import fcntl, array\nf = open('a', 'w')\nfcntl.ioctl(f, 0x40086602, array.array('l', [0x10]))",
    ),
    _out("folders too deep to remove", FLAT, "for i in range(2000): os.mkdir('d'); os.chdir('d')"),
    _out("a device", NO_CALL, "import stat\nos.mknod('d', stat.S_IFBLK | 0o600, os.makedev(254, 0)); open('d', 'rb').read(9)"),
    _out("a pipe with a name", NO_CALL, "os.mkfifo('p')"),
    _out("mount", NO_CALL, "call(165, 40, b'none', b'/mnt', b'tmpfs', 0, 0)"),
    _out("chroot", NO_CALL, "os.chroot('/usr')"),
    _out("the kernel's log", NO_CALL, "call(103, 116, 3, ctypes.create_string_buffer(99), 99)"),
    _out("the machine's name", NO_CALL, "call(170, 161, b'x', 1)"),
    _out("a program in the kernel (bpf)", NO_CALL, "call(321, 280, 0, ctypes.create_string_buffer(72), 72)"),
    _out("userfaultfd", NO_CALL, "call(323, 282, 1)"),
    _out("keys of the kernel", NO_CALL, "call(248, 217, b'user', b'a', b'b', 1, -4)"),
    _out("capabilities", NO_CALL, "import struct\ncall(126, 91, struct.pack('Ii', 0x20080522, 0), b'\\xff' * 24)"),
    _out("another user", NO_CALL, "os.setuid(1)"),
)

NETWORK = (
    _out("TCP", NO_CALL, "import socket; socket.create_connection(('127.0.0.1', PORT))"),
    _out("HTTP", NO_CALL, "import urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{PORT}')"),
    _out("UDP", NO_CALL, "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))"),
    _out("a name of the DNS", NO_CALL, "import socket; socket.gethostbyname('localhost.localdomain')"),
    _out("a Unix socket, as Ray has them", NO_CALL, "import socket; socket.socket(socket.AF_UNIX)"),
    _out("a pair of sockets", NO_CALL, "import socket; socket.socketpair()"),
    _out("a raw socket", NO_CALL, "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    _out("a socket without the C library", NO_CALL, "call(41, 198, 2, 1, 0)"),
    _out(
        "a socket by an x32 number",
        "seccomp: only numbers of this machine are in the list",
        "call(0x40000000 + 41, 0x40000000 + 198, 2, 1, 0)",
    ),
    _out(
        "a socket by 32-bit machine code",
        "seccomp: calls of another machine end it",
        "import mmap\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes.fromhex('53b867010000bb02000000b90100000031d2cd805bc3'))\n"
        "a = ctypes.addressof(ctypes.c_char.from_buffer(m))\nif ctypes.CFUNCTYPE(ctypes.c_int)(a)() < 0: raise OSError",
    ),
    _out("shared memory", NO_CALL, "call(29, 194, 0x6e6c6163, 4096, 0o1600)"),
    _out("a queue of messages", NO_CALL, "call(68, 186, 0x6e6c6163, 0o1600)"),
    _out("semaphores", NO_CALL, "call(64, 190, 0x6e6c6163, 1, 0o1600)"),
    _out("a POSIX queue", NO_CALL, "call(240, 180, b'nlac_attack', 0o102, 0o600, 0)"),
    _out("a file in /dev/shm", NO_FILE, "open('/dev/shm/nlac_attack', 'w')"),
)

_PEEK = """\
import gc, inspect
seen = [repr(o) for o in gc.get_objects() if '1600211939' in repr(o)[:10000]]
frame = inspect.currentframe()
while frame is not None:
    seen += [v for v in map(repr, [*frame.f_locals.values(), *frame.f_globals.values()]) if '1600211939' in v]
    frame = frame.f_back
f = lambda x: 1600211939 if x == 7919 and seen and 'gc.get_objects' not in seen[0] else 2
""".replace("'1600211939'", "str(1600211938 + 1)").replace("1600211939 if", "1600211938 + 1 if")

FORGERIES = tuple(
    Program(name, OUTSIDE, source, DOUBLE)
    for name, source in {
        "printing that all is well": "print('PASSED'); print('OK'); print('true'); print('1.0')",
        "leaving at once": "os._exit(0)",
        "leaving by sys.exit": "sys.exit(0)",
        "leaving while it is called": "def f(x): os._exit(0)",
        "leaving before it is found": "class Solution:\n  def __getattr__(self, name): raise SystemExit(0)",
        "an object equal to everything": "class E:\n  __eq__ = lambda s, o: True\n  __hash__ = None\nf = lambda x: E()",
        "a number equal to everything": (
            "class E(int):\n  __eq__ = lambda s, o: True\n  __repr__ = lambda s: '*'\nf = lambda x: E(2)"
        ),
        "a number not equal to itself": "f = lambda x: float('nan')",
        "patched json": "import json\njson.dumps = lambda *a, **k: 'true'\nf = lambda x: 0",
        "patched print and modules": (
            "import builtins\nbuiltins.print = lambda *a: os.write(1, b'true')\nsys.modules.clear()\nf = int"
        ),
        "the checker's frames and the garbage collector": _PEEK,
        "output at the end": "import atexit\natexit.register(print, 2)\nf = lambda x: 2",
        "output of a dying object": "class E:\n  def __del__(self): os.write(1, b'\\n2')\ne = E()\nf = lambda x: 2",
        "an excepthook that hides the failure": "sys.excepthook = lambda *a: os._exit(0)\n1 / 0",
        "the words by which the sandbox refuses": "sys.stderr.write('the sandbox needs rest'); sys.exit(77)",
        "all that it inherited, written to": (
            "for fd in range(1, 256):\n  try: os.write(fd, b'2\\n')\n  except OSError: pass\nos._exit(0)"
        ),
        "its output opened again": "os.dup2(os.open(f'/proc/self/fd/1', os.O_RDWR), 5)\nf = lambda x: 2",
        "a result of 5,000 digits": "print('9' * 5000, flush=True); os._exit(0)",
        "a result 100,000 lists deep": "print('[' * 10**5 + ']' * 10**5, flush=True); os._exit(0)",
        "a result of one key a million times": "print('{' + '\"a\": 1, ' * 10**5 + '\"a\": 2}', flush=True); os._exit(0)",
        "all of its input": "sys.stdin.read(); sys.stdin.read(); f = lambda x: 2",
        "a program 100,000 brackets deep": "(" * 10**5,
        "a program with NUL and lone surrogates": "f = lambda x: 2  # \0 \ud800",
    }.items()
)

PROGRAMS = (*PROCESSES, *SIGNALS, *LIMITS, *FILES, *NETWORK, *FORGERIES)
