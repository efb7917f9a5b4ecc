"""Attacks on the service's files, environment, processes, on the network and on the kernel."""

from tests.deployments.sandbox.attacks.attack import SHORT, Attack, endless, refused

CALLS = """
import ctypes
LIBC = ctypes.CDLL(None, use_errno=True)
def called(*arguments):
    return "refused" if LIBC.syscall(*arguments) < 0 and ctypes.get_errno() in (1, 22, 38, 13) else "BREACH"
def named(function, *arguments):
    return "refused" if getattr(LIBC, function)(*arguments) < 0 else "BREACH"
"""


BY_CALLS = {
    "tracing_the_parent": "print(called(101 if os.uname().machine == 'x86_64' else 117, 16, os.getppid(), 0, 0))",
    "copying_the_memory_of_others": (
        "print(called(310 if os.uname().machine == 'x86_64' else 270, os.getppid(), 0, 0, 0, 0, 0))"
    ),
    "becoming_root_by_a_program_that_may": "print('refused' if LIBC.prctl(39, 0, 0, 0, 0) == 1 else 'BREACH')",
    "a_user_namespace_of_its_own": "print(named('unshare', 0x10000000))",
    "a_namespace_by_clone": "print(called(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0))",
    "entering_another_namespace": "print(named('setns', 0, 0))",
    "mounting": "print(named('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None))",
    "unmounting": "print(named('umount2', b'/tmp', 2))",
    "another_root_directory": "print(named('chroot', b'.'))",
    "a_program_in_the_kernel": "print(called(321 if os.uname().machine == 'x86_64' else 280, 0, 0, 0))",
    "rings_of_requests": "print(called(425, 8, 0))",
    "keys_of_the_kernel": "print(called(250 if os.uname().machine == 'x86_64' else 219, 0, 0, 0, 0, 0))",
    "faults_by_userspace": "print(called(323 if os.uname().machine == 'x86_64' else 282, 0))",
    "calls_of_another_architecture": "print(called(0x40000000 + 39))",
}
"""By calls of the kernel that Python does not offer."""
ON_THE_SERVICE = [
    *refused(
        {
            "files": {
                "reading_a_file_of_the_service": "print(attempt(lambda: open(sys.argv[6]).read()))",
                "writing_over_the_interpreter": "print(attempt(lambda: open(sys.executable, 'r+b')))",
                "removing_a_library": "print(attempt(lambda: os.unlink(os.__file__)))",
                "climbing_out_by_dots": "print(attempt(lambda: open('../' * 40 + sys.argv[6].lstrip('/')).read()))",
                "reading_through_a_symlink": (
                    "os.symlink(sys.argv[6], 'link'); print(attempt(lambda: open('link').read()))"
                ),
                "writing_through_a_symlink_in_place_of_the_program": """
        os.unlink("main.py")
        os.symlink(os.__file__, "main.py")
        print(attempt(lambda: open("main.py", "r+b").write(b"x")))
        """,
                "a_hard_link_to_a_program_of_the_system": "print(attempt(lambda: os.link(sys.executable, 'python')))",
                "reaching_outside_through_open_directories": """
        found = []
        for fd in range(64):
            try: found.append(open(os.open(sys.argv[6].lstrip("/"), os.O_RDONLY, dir_fd=fd)).read())
            except OSError: pass
        print("BREACH" if found else "refused")
        """,
                "reaching_outside_through_proc": """
        found = []
        for process in [*range(1, 40), os.getppid(), int(sys.argv[2]), "self"]:
            for place in ("root", "cwd"):
                try: found.append(open(f"/proc/{process}/{place}{sys.argv[6]}").read())
                except OSError: pass
        print("BREACH" if found else "refused")
        """,
                "making_a_device": "print(attempt(lambda: os.mknod('disk', 0o60666, os.makedev(254, 0))))",
                "using_open_files_of_the_service": """
        def is_open(fd):
            try: os.fstat(fd)
            except OSError: return False
            return True
        print("BREACH" if any(is_open(fd) for fd in range(3, 64)) else "refused")
        """,
                "walking_sys": """
        found = [path for path, _, _ in os.walk("/sys")]
        print("BREACH" if len(found) > 1 else "refused")
        """,
            },
            "file_size": {
                "one_huge_file": "print(attempt(lambda: open('huge', 'wb').write(bytes(2 ** 21))))",
                "one_huge_file_with_holes": "print(attempt(lambda: open('huge', 'wb').truncate(2 ** 40)))",
            },
            "disk": {
                "many_files": "print(attempt(lambda: [open(f'{i}', 'wb').write(bytes(2 ** 19)) for i in range(20)]))",
                "many_files_in_shared_memory": (
                    "print(attempt(lambda: [open(f'/dev/shm/{i}', 'wb').write(bytes(2 ** 19)) for i in range(20)]))"
                ),
            },
            None: {
                "writing_to_its_own_stdin": "print(attempt(lambda: os.write(0, b'x' * 2 ** 20)))",
                "precedence_over_the_service": (
                    "print(attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))))"
                ),
                "setting_the_clock": "print(attempt(lambda: time.clock_settime(time.CLOCK_REALTIME, 0)))",
            },
            "environment_variables": {
                "reading_the_environment_of_the_service": """
        found = [str(dict(os.environ))]
        for process in [*range(1, 40), os.getppid(), int(sys.argv[2]), "self"]:
            try: found.append(open(f"/proc/{process}/environ").read())
            except OSError: pass
        print("BREACH" if "ROLLOUT_ATTACKED_SECRET" in "".join(found) else "refused")
        """,
            },
            "service_processes": {
                "walking_proc": """
        def processes():
            try: return [name for name in os.listdir("/proc") if name.isdigit()]
            except OSError: return []
        seen = []
        for process in processes():
            try: seen.append(open(f"/proc/{process}/cmdline").read())
            except OSError: pass
        # All processes of the run have the token among their arguments.
        print("BREACH" if any(line and sys.argv[1] not in line for line in seen) else "refused")
        """,
                "reading_the_memory_of_others": """
        found = []
        for process in [*range(1, 3), os.getppid(), int(sys.argv[2])]:
            if process != os.getpid():
                try: found.append(open(f"/proc/{process}/maps").read())
                except OSError: pass
        print("BREACH" if any("libpython" in text or "pytest" in text for text in found) else "refused")
        """,
            },
            "network": {
                "connecting_to_the_service": (
                    "print(attempt(lambda: socket.create_connection(('127.0.0.1', int(sys.argv[3])), 2)))"
                ),
                "connecting_to_the_world": "print(attempt(lambda: socket.create_connection(('1.1.1.1', 53), 2)))",
                "sending_a_datagram": """
        def send():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out: out.sendto(b"x", ("8.8.8.8", 53))
        print(attempt(send))
        """,
                "asking_for_a_name": "print(attempt(lambda: socket.getaddrinfo('example.com', 80)))",
                "an_abstract_socket_of_the_service": (
                    "print(attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[4])))"
                ),
                "a_socket_file_of_the_service": (
                    "print(attempt(lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[5])))"
                ),
            },
            "system_calls": {
                "more_than_its_share_of_processors": "print(attempt(lambda: os.setpriority(0, 0, -20)))",
                **{name: CALLS + source for name, source in BY_CALLS.items()},
            },
        }
    ),
    Attack(
        "reading_secrets_of_the_system",
        "files",
        """
        paths = ["/etc/shadow", "/etc/passwd", "/root/.ssh", "/home", "/var/log", "/proc/kcore", "/dev/mem", "/dev/vda"]
        print({attempt(lambda: open(path, "rb").read(1) if "." in path or path.count("/") > 1 else os.listdir(path))
               for path in paths})
        """,
        stdout="{'refused'}\n",
    ),
    Attack(
        "writing_outside",
        "files",
        """
        paths = ["/etc/passwd", "/usr/bin/x", "/usr/lib/x", "/bin/x", "/x", "/root/x", "/home/x", "/var/x", "/dev/x"]
        print({attempt(lambda: open(path, "wb").write(b"x")) for path in paths})
        """,
        stdout="{'refused'}\n",
    ),
    endless(
        "files_without_content_forever",
        "processor_time",
        "number = 0\nwhile True: open(str(number), 'w').close(); number += 1",
        "processor_time",
        "exit",
    ),
    Attack(
        "a_deep_tree_of_directories",
        None,
        """
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        print("made")
        """,
        stdout="made\n",
    ),
    Attack(
        "writing_settings_of_the_kernel",
        "files",
        """
        names = ["sys/kernel/core_pattern", "sysrq-trigger", "sys/vm/drop_caches", "sys/kernel/hostname"]
        paths = ["/proc/" + name for name in names]
        print({attempt(lambda: open(path, "w").write("1")) for path in paths})
        """,
        stdout="{'refused'}\n",
    ),
    Attack(
        "killing_the_service",
        "service_processes",
        """
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
            attempt(lambda: os.kill(int(sys.argv[2]), number))
        print("tried")
        """,
        stdout="tried\n",
    ),
    Attack(
        "killing_the_parent",
        "service_processes",
        """
        for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
            if os.getppid() > 0: attempt(lambda: os.kill(os.getppid(), number))
        print("tried")
        """,
        ended_by=("exit", "time"),
        exit_code=None,
        stdout=None,
        limits=SHORT,
    ),
    Attack(
        "killing_its_process_group",
        "service_processes",
        "os.killpg(0, signal.SIGKILL); time.sleep(60)",
        exit_code=137,
        stdout="",
    ),
    Attack(
        "becoming_root",
        "files",
        "print({attempt(lambda: os.setuid(0)), attempt(lambda: os.setgroups([0]))} if os.getuid() else 'BREACH')",
        stdout="{'refused'}\n",
    ),
    Attack(
        "raw_and_unusual_sockets",
        "system_calls",
        """
        families = [(2, 3), (17, 3), (16, 3), (40, 1), (38, 5), (29, 3), (31, 3)]
        print({attempt(lambda: socket.socket(family, kind)) for family, kind in families})
        """,
        stdout="{'refused'}\n",
    ),
    Attack("restarting_the_machine", None, CALLS + "print(named('reboot', 0x1234567))"),
]
