"""Attacks by many processes, by time, by memory and by output."""

from tests.deployments.sandbox.attacks.attack import SHORT, Attack, endless, refused

FORK_MANY = """
started = 0
while started < 40:
    try: child = os.fork()
    except OSError: break
    if child == 0: time.sleep(60)
    started += 1
tell(started >= 16)
"""
MAP_SHARED = (
    "\nimport mmap\nheld = []\nprint(attempt(lambda: [held.append(mmap.mmap(-1, 2 ** 22)) for _ in range(100)]))"
)
RAISE_LIMITS = """
import resource
def raise_limit(name):
    try: resource.setrlimit(name, (2 ** 40, 2 ** 40))
    except ValueError: raise OSError
names = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
print(attempt(raise_limit, names))
"""
FORK_ON = """
while True:
    try: os.fork()
    except OSError: pass
"""
DEAF = """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
"""
OUTLIVE_DEAF = f"""
if os.fork() == 0:
    {DEAF.replace(chr(10), chr(10) + "    ")}
    os.setsid()
    os.closerange(0, 64)
    while True: pass
print("left")
"""
HAND_OVER = """
print("left", flush=True)
if os.fork() == 0:
    os.closerange(0, 64)
    while True:
        if os.fork(): os._exit(0)
        os.setsid()
"""
HOLD_TOGETHER = """
for _ in range(8):
    if os.fork() == 0: break
held = bytearray(b"x") * (30 * 2 ** 20)
time.sleep(60)
"""
FORGE = """
for fd in range(1, 64):
    try: os.write(fd, b'{"exit-code": 0}\\n')
    except OSError: pass
os._exit(7)
"""
LEAVE_OPEN = "if os.fork() == 0: time.sleep(60)\nprint('left')"
RESTART = "os.execv(sys.executable, [sys.executable, '-s', '-S', *sys.argv])"
WRITE_BY_MANY = "[os.fork() for _ in range(3)]\nwhile True: os.write(1, b'x' * 4096)"
NO_TEXT = "os.write(1, bytes([0, 255, 254, 27]) + b'[2J')"
ON_PROCESSES = [
    *refused(
        {
            "process_count": {"more_processes_than_permitted": FORK_MANY},
            "memory": {
                "memory_shared_by_mapping": MAP_SHARED,
                "hoarding_pipes": "\nheld = []\nprint(attempt(lambda: [held.append(os.pipe()) for _ in range(64)]))",
                "raising_its_own_limits": RAISE_LIMITS,
            },
            "system_calls": {
                "memory_of_files_without_a_name": "os.memfd_create('held')",
                "memory_that_outlives_its_process": "tell(libc('shmget', 0, 2 ** 20, 0o1600)[0] >= 0)",
            },
        }
    ),
    endless("fork_bomb", "process_count", FORK_ON, "processor_time", "memory", "time"),
    Attack("outliving_the_run_deaf_to_signals", "ends_whole", OUTLIVE_DEAF, stdout="left\n"),
    Attack("keeping_the_output_open_after_the_end", "ends_whole", LEAVE_OPEN, stdout="left\n"),
    Attack("a_chain_of_processes_that_hand_over", "ends_whole", HAND_OVER, stdout="left\n"),
    endless("endless_loop_deaf_to_signals", "processor_time", DEAF + "while True: pass", "processor_time"),
    endless("one_operation_that_never_ends", "processor_time", "10 ** 10 ** 10", "processor_time"),
    endless("starting_itself_anew_forever", "processor_time", RESTART, "processor_time"),
    endless("sleeping_forever", None, "time.sleep(10 ** 6)", "time", limits=SHORT),
    endless("stopping_itself", None, "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)", "time", limits=SHORT),
    endless("closing_its_output_and_sleeping", None, "os.closerange(0, 64); time.sleep(10 ** 6)", "time", limits=SHORT),
    endless("memory_bomb", "memory", "held = [bytearray(2 ** 20) for _ in range(1000)]", "exit", "memory"),
    Attack("memory_in_one_piece", "memory", "held = 'x' * 10 ** 11", exit_code=1, stdout=""),
    endless("memory_of_many_processes", "total_memory", HOLD_TOGETHER, "memory"),
    Attack("deep_nesting_of_source", None, "eval('(' * 10 ** 4)", exit_code=1, stdout=""),
    Attack("crash_of_the_interpreter", None, "import ctypes; ctypes.string_at(0)", exit_code=139, stdout=""),
    Attack("abort_with_a_core_dump", "disk", "os.abort()", exit_code=134, stdout=""),
    endless("gigabytes_of_output", None, "while True: os.write(1, b'x' * 2 ** 20)", "output"),
    endless("gigabytes_of_errors", None, "while True: os.write(2, b'x' * 2 ** 20)", "output"),
    endless("gigabytes_of_output_by_many_processes", None, WRITE_BY_MANY, "output"),
    Attack("output_that_is_no_text", None, NO_TEXT, stdout="\0\ufffd\ufffd\x1b[2J"),
    Attack("forging_how_it_ended", None, FORGE, exit_code=7, stdout='{"exit-code": 0}\n'),
]
