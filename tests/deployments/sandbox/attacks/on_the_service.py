"""Attacks on the service's files, environment, processes, on the network and on the kernel."""

from tests.deployments.sandbox.attacks.attack import SHORT, Attack, endless, refused

READ_SECRETS = """
def look(path):
    return open(path, "rb").read(1) if "." in path or path.count("/") > 1 else os.listdir(path)
paths = ["/etc/shadow", "/etc/passwd", "/root/.ssh", "/home", "/var/log", "/proc/kcore", "/dev/mem", "/dev/vda"]
print(attempt(look, paths))
"""
WRITE_OUTSIDE = """
paths = ["/etc/passwd", "/usr/bin/x", "/usr/lib/x", "/bin/x", "/x", "/root/x", "/home/x", "/var/x", "/dev/x"]
print(attempt(lambda path: open(path, "wb").write(b"x"), paths))
"""
WRITE_SETTINGS = """
names = ["sys/kernel/core_pattern", "sysrq-trigger", "sys/vm/drop_caches", "sys/kernel/hostname"]
print(attempt(lambda name: open("/proc/" + name, "w").write("1"), names))
"""
LINK_TO_SECRET = "\nos.symlink(sys.argv[6], 'link')\nprint(attempt(lambda: open('link').read()))"
REPLACE_PROGRAM = """
os.unlink("main.py")
os.symlink(os.__file__, "main.py")
print(attempt(lambda: open("main.py", "r+b").write(b"x")))
"""
SEND = """
def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out: out.sendto(b"x", ("8.8.8.8", 53))
print(attempt(send))
"""
WALK_PROC = """
seen = []
attempt(lambda: seen.extend(texts(f"/proc/{name}/cmdline" for name in os.listdir("/proc") if name.isdigit())))
# All processes of the run have the token among their arguments.
tell(any(line and sys.argv[1] not in line for line in seen))
"""
READ_MEMORY = """
others = {*range(1, 3), os.getppid(), int(sys.argv[2])} - {os.getpid()}
tell(any("libpython" in text or "pytest" in text for text in texts(f"/proc/{process}/maps" for process in others)))
"""
IN_PROC = "tell(texts(f'/proc/{process}/{place}{sys.argv[6]}' for process in PROCESSES for place in ('root', 'cwd')))"
ENVIRONMENT = """
found = [str(dict(os.environ)), *texts(f"/proc/{process}/environ" for process in PROCESSES)]
tell("ROLLOUT_ATTACKED_SECRET" in "".join(found))
"""
KILL = """
for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL): attempt(lambda: os.kill({}, number))
print('tried')
"""
KILL_PARENT = KILL.format("os.getppid() or 2 ** 22")
KILL_GROUP = "os.killpg(0, signal.SIGKILL); time.sleep(60)"
WITHOUT_CONTENT = "number = 0\nwhile True: open(str(number), 'w').close(); number += 1"
DEEP_TREE = "for _ in range(1500): os.mkdir('d'); os.chdir('d')\nprint('made')"
SOCKETS = "[(2, 3), (17, 3), (16, 3), (40, 1), (38, 5), (29, 3), (31, 3)]"
"""Families and kinds that are raw or unusual."""
ON_THE_SERVICE = [
    *refused(
        {
            "files": {
                "reading_a_file_of_the_service": "open(sys.argv[6]).read()",
                "writing_over_the_interpreter": "open(sys.executable, 'r+b')",
                "removing_a_library": "os.unlink(os.__file__)",
                "climbing_out_by_dots": "open('../' * 40 + sys.argv[6].lstrip('/')).read()",
                "reading_through_a_symlink": LINK_TO_SECRET,
                "writing_through_a_symlink_in_place_of_the_program": REPLACE_PROGRAM,
                "a_hard_link_to_a_program_of_the_system": "os.link(sys.executable, 'python')",
                "reaching_outside_through_open_directories": (
                    "print(attempt(lambda fd: os.open(sys.argv[6].lstrip('/'), os.O_RDONLY, dir_fd=fd), range(64)))"
                ),
                "reaching_outside_through_proc": IN_PROC,
                "making_a_device": "os.mknod('disk', 0o60666, os.makedev(254, 0))",
                "using_open_files_of_the_service": "print(attempt(os.fstat, range(3, 64)))",
                "walking_sys": "tell(len([path for path, _, _ in os.walk('/sys')]) > 1)",
                "reading_secrets_of_the_system": READ_SECRETS,
                "writing_outside": WRITE_OUTSIDE,
                "writing_settings_of_the_kernel": WRITE_SETTINGS,
                "becoming_root": (
                    "print(attempt(lambda become: become(), [lambda: os.setuid(0), lambda: os.setgroups([0])]) "
                    "if os.getuid() else 'BREACH')"
                ),
            },
            "file_size": {
                "one_huge_file": "open('huge', 'wb').write(bytes(2 ** 21))",
                "one_huge_file_with_holes": "open('huge', 'wb').truncate(2 ** 40)",
            },
            "disk": {
                "many_files": "[open(f'{i}', 'wb').write(bytes(2 ** 19)) for i in range(20)]",
                "many_files_in_shared_memory": "[open(f'/dev/shm/{i}', 'wb').write(bytes(2 ** 19)) for i in range(20)]",
            },
            None: {
                "writing_to_its_own_stdin": "os.write(0, b'x' * 2 ** 20)",
                "precedence_over_the_service": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))",
                "setting_the_clock": "time.clock_settime(time.CLOCK_REALTIME, 0)",
                "restarting_the_machine": "tell(libc('reboot', 0x1234567)[0] >= 0)",
            },
            "environment_variables": {"reading_the_environment_of_the_service": ENVIRONMENT},
            "service_processes": {"walking_proc": WALK_PROC, "reading_the_memory_of_others": READ_MEMORY},
            "network": {
                "connecting_to_the_service": "socket.create_connection(('127.0.0.1', int(sys.argv[3])), 2)",
                "connecting_to_the_world": "socket.create_connection(('1.1.1.1', 53), 2)",
                "sending_a_datagram": SEND,
                "asking_for_a_name": "socket.getaddrinfo('example.com', 80)",
                "an_abstract_socket_of_the_service": "socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[4])",
                "a_socket_file_of_the_service": "socket.socket(socket.AF_UNIX).connect(sys.argv[5])",
            },
            "system_calls": {
                "more_than_its_share_of_processors": "os.setpriority(0, 0, -20)",
                "raw_and_unusual_sockets": f"print(attempt(lambda each: socket.socket(*each), {SOCKETS}))",
                # Numbers of x86_64 and of aarch64.
                "tracing_the_parent": "call(101, 117, 16, os.getppid(), 0, 0)",
                "copying_the_memory_of_others": "call(310, 270, os.getppid(), 0, 0, 0, 0, 0)",
                "a_namespace_by_clone": "call(56, 220, 0x10000011, 0, 0, 0, 0)",
                "a_program_in_the_kernel": "call(321, 280, 0, 0, 0)",
                "rings_of_requests": "call(425, 425, 8, 0)",
                "keys_of_the_kernel": "call(250, 219, 0, 0, 0, 0, 0)",
                "faults_by_userspace": "call(323, 282, 0)",
                "calls_of_another_architecture": "call(0x40000000 + 39, 0x40000000 + 39)",
                "becoming_root_by_a_program_that_may": "tell(libc('prctl', 39, 0, 0, 0, 0)[0] != 1)",
                "a_user_namespace_of_its_own": "tell(libc('unshare', 0x10000000)[0] >= 0)",
                "entering_another_namespace": "tell(libc('setns', 0, 0)[0] >= 0)",
                "mounting": "tell(libc('mount', b'tmpfs', b'/tmp', b'tmpfs', 0, None)[0] >= 0)",
                "unmounting": "tell(libc('umount2', b'/tmp', 2)[0] >= 0)",
                "another_root_directory": "tell(libc('chroot', b'.')[0] >= 0)",
            },
        }
    ),
    endless("files_without_content_forever", "processor_time", WITHOUT_CONTENT, "processor_time", "exit"),
    Attack("a_deep_tree_of_directories", None, DEEP_TREE, stdout="made\n"),
    Attack("killing_the_service", "service_processes", KILL.format("int(sys.argv[2])"), stdout="tried\n"),
    endless("killing_the_parent", "service_processes", KILL_PARENT, "exit", "time", limits=SHORT),
    Attack("killing_its_process_group", "service_processes", KILL_GROUP, exit_code=137, stdout=""),
]
