"""Attacks by many processes, by time, by memory and by output."""

from tests.deployments.sandbox.attacks.attack import SHORT, Attack, endless, refused

ON_PROCESSES = [
    *refused(
        {
            "process_count": {
                "more_processes_than_permitted": """
        started = 0
        while started < 40:
            try: child = os.fork()
            except OSError: break
            if child == 0: time.sleep(60)
            started += 1
        print("BREACH" if started >= 16 else "refused")
        """,
                "more_threads_than_permitted": """
        import threading
        threading.stack_size(65536)
        started = 0
        try:
            while started < 40:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                started += 1
        except RuntimeError: pass
        print("BREACH" if started >= 16 else "refused")
        """,
            },
            "memory": {
                "memory_shared_by_mapping": """
        import mmap
        held = []
        print(attempt(lambda: [held.append(mmap.mmap(-1, 2 ** 22)) for _ in range(100)]))
        """,
                "hoarding_pipes": """
        held = []
        print(attempt(lambda: [held.append(os.pipe()) for _ in range(64)]))
        """,
            },
            "system_calls": {
                "memory_of_files_without_a_name": "print(attempt(lambda: os.memfd_create('held')))",
                "memory_that_outlives_its_process": """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        print("refused" if libc.shmget(0, 2 ** 20, 0o1600) < 0 else "BREACH")
        """,
            },
        }
    ),
    endless(
        "fork_bomb",
        "process_count",
        """
        while True:
            try: os.fork()
            except OSError: pass
        """,
        "processor_time",
        "memory",
        "time",
    ),
    Attack(
        "outliving_the_run_deaf_to_signals",
        "ends_whole",
        """
        if os.fork() == 0:
            for number in range(1, 65):
                try: signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError): pass
            os.setsid()
            os.closerange(0, 64)
            while True: pass
        print("left")
        """,
        stdout="left\n",
    ),
    Attack(
        "keeping_the_output_open_after_the_end",
        "ends_whole",
        """
        if os.fork() == 0:
            time.sleep(60)
        print("left")
        """,
        stdout="left\n",
    ),
    Attack(
        "a_chain_of_processes_that_hand_over",
        "ends_whole",
        """
        print("left", flush=True)
        if os.fork() == 0:
            os.closerange(0, 64)
            while True:
                if os.fork(): os._exit(0)
                os.setsid()
        """,
        stdout="left\n",
    ),
    endless(
        "endless_loop_deaf_to_signals",
        "processor_time",
        """
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
        """,
        "processor_time",
    ),
    endless("one_operation_that_never_ends", "processor_time", "10 ** 10 ** 10", "processor_time"),
    endless(
        "starting_itself_anew_forever",
        "processor_time",
        "os.execv(sys.executable, [sys.executable, '-s', '-S', *sys.argv])",
        "processor_time",
    ),
    endless("sleeping_forever", None, "time.sleep(10 ** 6)", "time", limits=SHORT),
    endless("stopping_itself", None, "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(60)", "time", limits=SHORT),
    endless("closing_its_output_and_sleeping", None, "os.closerange(0, 64); time.sleep(10 ** 6)", "time", limits=SHORT),
    endless("memory_bomb", "memory", "held = [bytearray(2 ** 20) for _ in range(1000)]", "exit", "memory"),
    Attack("memory_in_one_piece", "memory", "held = 'x' * 10 ** 11", exit_code=1, stdout=""),
    endless(
        "memory_of_many_processes",
        "total_memory",
        """
        for _ in range(8):
            if os.fork() == 0: break
        held = bytearray(b"x") * (30 * 2 ** 20)
        time.sleep(60)
        """,
        "memory",
    ),
    Attack(
        "raising_its_own_limits",
        "memory",
        """
        import resource
        def raise_limit(name):
            try: resource.setrlimit(name, (2 ** 40, 2 ** 40))
            except (ValueError, OSError): return "refused"
            return "BREACH"
        names = (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
        print({raise_limit(name) for name in names})
        """,
        stdout="{'refused'}\n",
    ),
    Attack("deep_nesting_of_source", None, "eval('(' * 10 ** 4)", exit_code=1, stdout=""),
    Attack("crash_of_the_interpreter", None, "import ctypes; ctypes.string_at(0)", exit_code=139, stdout=""),
    Attack("abort_with_a_core_dump", "disk", "os.abort()", exit_code=134, stdout=""),
    endless("gigabytes_of_output", None, "while True: os.write(1, b'x' * 2 ** 20)", "output"),
    endless("gigabytes_of_errors", None, "while True: os.write(2, b'x' * 2 ** 20)", "output"),
    endless(
        "gigabytes_of_output_by_many_processes",
        None,
        "[os.fork() for _ in range(3)]\nwhile True: os.write(1, b'x' * 4096)",
        "output",
    ),
    Attack(
        "output_that_is_no_text", None, "os.write(1, bytes([0, 255, 254, 27]) + b'[2J')", stdout="\0\ufffd\ufffd\x1b[2J"
    ),
    Attack(
        "forging_how_it_ended",
        None,
        """
        for fd in range(1, 64):
            try: os.write(fd, b'{"exit-code": 0}\\n')
            except OSError: pass
        os._exit(7)
        """,
        exit_code=7,
        stdout='{"exit-code": 0}\n',
    ),
]
