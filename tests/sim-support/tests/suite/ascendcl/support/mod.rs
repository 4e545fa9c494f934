//! Agents: processes that call the library on command.
//!
//! A test binary starts itself with one test, `agent`, which loads the library and serves commands. A command is a call as a line of words:
//!
//! * `aclrtMalloc &p 4096 0`: `&p` is the address of the variable `p`, `p` its value, `p+32` the value plus 32,
//!   `@text` a string, and other words are numbers. The answer is the status;
//! * `elsewhere` before the call makes it on a new thread, `forked` in a child of the process.
//!
//! Every wait has a deadline, and dropping the guard of a process kills and reaps it.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write as _;
use std::path::PathBuf;

use device_ipc_sim_ascendcl::{Cann, MACHINE_VARIABLE, VISIBLE_VARIABLE, install, library};
use device_ipc_test_process::{answer, command_of_test, hex, request, unhex};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

const ROLE: &str = "SIM_ASCENDCL_TEST_LIBRARY";

/// Statuses by the vendor's names.
pub const INVALID_PARAM: i32 = 100_000;
pub const UNINITIALIZE: i32 = 100_001;
pub const REPEAT_INITIALIZE: i32 = 100_002;
pub const STUB: i32 = 100_039;
pub const PARAM: i32 = 107_000;
pub const INVALID_DEVICE: i32 = 107_001;
pub const CONTEXT_NULL: i32 = 107_002;
pub const STREAM_CONTEXT: i32 = 107_003;
pub const UNALIGNED: i32 = 107_008;
pub const INVALID_HANDLE: i32 = 107_017;
pub const TASK_TIMEOUT: i32 = 107_020;
pub const NOT_SUPPORTED: i32 = 207_000;
pub const OUT_OF_MEMORY: i32 = 207_001;
pub const NO_PERMISSION: i32 = 207_006;
pub const NO_NOTIFY: i32 = 207_009;
pub const KERNEL_TRAP: i32 = 507_035;
pub const STREAM_TIMEOUT: i32 = 507_046;
pub const DEVICE_MEMORY: i32 = 507_053;
pub const REMOTE: i32 = 507_057;
pub const DRIVER: i32 = 507_899;

/// The setup of a process.
#[derive(Debug, Clone, Copy, Default)]
pub struct Setup<'a> {
    pub machine: &'a str,
    pub visible: Option<&'a str>,
    pub cann: Cann,
}

/// A process that has loaded the library.
#[derive(Debug)]
pub struct Process {
    agent: device_ipc_test_process::Process,
    _directory: Option<tempfile::TempDir>,
}

impl Process {
    /// Starts a process with two devices, or with the described machine.
    pub fn start(machine: &str) -> Self {
        Self::with(&Setup { machine, ..Setup::default() })
    }

    /// Starts a process, initializes the library and sets a device.
    pub fn ready(machine: &str, device: u32) -> Self {
        let mut process = Self::start(machine);
        process.ok("aclInit 0");
        process.ok(&format!("aclrtSetDevice {device}"));
        process
    }

    pub fn with(setup: &Setup<'_>) -> Self {
        let (directory, path) = match setup.cann {
            Cann::V9_1 => (None, library().expect("the library was built")),
            cann => {
                let directory = tempfile::tempdir().expect("a directory");
                let path = install(directory.path(), cann).expect("installed");
                (Some(directory), path)
            }
        };
        let mut command = command_of_test(concat!(module_path!(), "::agent"));
        command
            .env(ROLE, path)
            .env(MACHINE_VARIABLE, format!("latency=0;cann={};{}", setup.cann.name(), setup.machine))
            .env_remove(VISIBLE_VARIABLE);
        if let Some(visible) = setup.visible {
            command.env(VISIBLE_VARIABLE, visible);
        }
        Self { agent: device_ipc_test_process::Process::start("agent", &mut command), _directory: directory }
    }

    pub fn pid(&self) -> u32 {
        self.agent.id()
    }

    #[track_caller]
    fn ask(&mut self, command: &str) -> String {
        self.agent.ask(command)
    }

    /// Makes a call, and returns its status.
    #[track_caller]
    pub fn call(&mut self, command: &str) -> i32 {
        let answer = self.ask(command);
        answer.parse().unwrap_or_else(|_| panic!("'{command}' answered {answer}"))
    }

    /// Makes a call that must succeed.
    #[track_caller]
    pub fn ok(&mut self, command: &str) {
        let status = self.call(command);
        assert_eq!(status, 0, "{command}: {}", self.message());
    }

    /// Makes a call that must return this status.
    #[track_caller]
    pub fn gives(&mut self, command: &str, status: i32) {
        assert_eq!(self.call(command), status, "{command}");
    }

    /// Returns the text of `aclGetRecentErrMsg`.
    pub fn message(&mut self) -> String {
        self.ask("string aclGetRecentErrMsg")
    }

    /// Returns the text that a call returns.
    pub fn string(&mut self, name: &str) -> String {
        self.ask(&format!("string {name}"))
    }

    /// Returns whether the library has a symbol.
    pub fn has(&mut self, name: &str) -> bool {
        self.ask(&format!("has {name}")) == "true"
    }

    /// Returns the first 8 bytes of a variable.
    pub fn get(&mut self, name: &str) -> u64 {
        u64::from_le_bytes(self.bytes(name, 8).try_into().expect("8 bytes"))
    }

    /// Returns the first 4 bytes of a variable.
    pub fn get32(&mut self, name: &str) -> i32 {
        i32::from_le_bytes(self.bytes(name, 4).try_into().expect("4 bytes"))
    }

    pub fn set(&mut self, name: &str, value: u64) {
        self.put(name, &value.to_le_bytes());
    }

    pub fn bytes(&mut self, name: &str, count: usize) -> Vec<u8> {
        unhex(&self.ask(&format!("bytes {name} {count}")))
    }

    pub fn put(&mut self, name: &str, bytes: &[u8]) {
        self.ask(&format!("put {name} {}", hex(bytes)));
    }

    /// Exports the memory at a variable's value, and returns the key.
    #[track_caller]
    pub fn key_of(&mut self, pointer: &str, size: u64, flags: u64) -> Vec<u8> {
        self.ok(&format!("aclrtIpcMemGetExportKey {pointer} {size} &key 65 {flags}"));
        self.bytes("key", 65)
    }

    /// Writes bytes at a device address, and waits.
    #[track_caller]
    pub fn write(&mut self, pointer: &str, bytes: &[u8]) {
        self.put("out", bytes);
        let count = bytes.len();
        self.ok(&format!("aclrtMemcpy {pointer} {count} &out {count} 1"));
    }

    /// Reads bytes at a device address.
    #[track_caller]
    pub fn read(&mut self, pointer: &str, count: usize) -> Vec<u8> {
        self.ok(&format!("aclrtMemcpy &in {count} {pointer} {count} 2"));
        self.bytes("in", count)
    }

    /// Kills the process by SIGKILL and reaps it.
    pub fn kill(&mut self) {
        self.agent.kill();
    }

    /// Sends a command, and waits until the process prints a line with this text. Returns the answer.
    #[track_caller]
    pub fn prints(&mut self, command: &str, text: &str) -> String {
        self.agent.send(command);
        self.agent.line(|line| line.contains(text).then_some(()));
        self.agent.receive()
    }
}

/// The thread or process that makes a call.
enum Where {
    Here,
    OnAThread,
    InAChild,
}

/// Makes a call in a forked child, and returns its status.
fn in_a_child(run: impl FnOnce() -> i32) -> i32 {
    let (mut theirs, mut ours) = std::io::pipe().expect("a pipe");
    // SAFETY: no other thread calls the library, so none holds a lock of it that the child would wait for; the
    // child makes the call, writes and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let status = run();
        let written = ours.write_all(&status.to_le_bytes());
        // SAFETY: exits the process at once.
        unsafe { libc::_exit(i32::from(written.is_err())) };
    }
    drop(ours);
    let mut status = [0; 4];
    std::io::Read::read_exact(&mut theirs, &mut status).expect("the child answers");
    // SAFETY: a child of this process; no other code waits for it.
    let reaped = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
    assert_eq!(reaped, child);
    i32::from_le_bytes(status)
}

struct Agent {
    library: Library,
    variables: HashMap<String, Box<[u8; 512]>>,
}

/// With the C calling conventions of Linux, additional arguments of a function are harmless.
type Call = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64) -> i32;
type TextCall = unsafe extern "C" fn() -> *const c_char;
type OpenEvent = unsafe extern "C" fn([u64; 8], u64) -> i32;

impl Agent {
    fn obey(&mut self, line: &str) -> String {
        let words: Vec<&str> = line.split(' ').collect();
        match words[0] {
            "bytes" => hex(&self.variable(words[1])[..words[2].parse().expect("a count")]),
            "put" => {
                let bytes = unhex(words.get(2).copied().unwrap_or_default());
                self.variable(words[1])[..bytes.len()].copy_from_slice(&bytes);
                String::new()
            }
            // SAFETY: only the address is used.
            "has" => unsafe { self.library.get::<Call>(words[1]) }.is_ok().to_string(),
            "string" => {
                // SAFETY: the functions that tests name have no arguments and return a string, or null.
                let text = unsafe { self.library.get::<TextCall>(words[1]).expect("the export exists")() };
                if text.is_null() {
                    return "null".to_owned();
                }
                // SAFETY: not null, so it is a string.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            }
            "aclrtIpcOpenEventHandle" => {
                let handle = self.variable(words[1]);
                let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| handle[8 * at + byte]));
                let handle: [u64; 8] = std::array::from_fn(word);
                let event = self.value(words[2]);
                // SAFETY: 64 bytes are passed by value on the stack, whatever their type, and the last argument is
                // the address of a variable.
                unsafe { self.library.get::<OpenEvent>(words[0]).expect("the export exists")(handle, event) }
                    .to_string()
            }
            "elsewhere" => self.call(&words[1..], Where::OnAThread),
            "forked" => self.call(&words[1..], Where::InAChild),
            _ => self.call(&words, Where::Here),
        }
    }

    fn call(&mut self, words: &[&str], place: Where) -> String {
        let strings: Vec<CString> = words
            .iter()
            .filter_map(|word| word.strip_prefix('@'))
            .map(|text| CString::new(text).expect("no NUL"))
            .collect();
        let mut texts = strings.iter();
        let mut arguments = [0_u64; 8];
        for (argument, word) in arguments.iter_mut().zip(&words[1..]) {
            *argument = match word.strip_prefix('@') {
                Some(_) => texts.next().expect("one for each").as_ptr() as u64,
                None => self.value(word),
            };
        }
        // SAFETY: the calls that tests name are functions of integers and pointers that return an int.
        let call = unsafe { self.library.get::<Call>(words[0]) };
        let Ok(call) = call else { return format!("no symbol {}", words[0]) };
        let call: Call = *call;
        let [a, b, c, d, e, f, g, h] = arguments;
        // SAFETY: as above; the pointers are variables of this process, or addresses that the library returned.
        let run = move || unsafe { call(a, b, c, d, e, f, g, h) };
        let status = match place {
            Where::Here => run(),
            Where::OnAThread => std::thread::spawn(run).join().expect("it returns"),
            Where::InAChild => in_a_child(run),
        };
        status.to_string()
    }

    fn variable(&mut self, name: &str) -> &mut [u8; 512] {
        self.variables.entry(name.to_owned()).or_insert_with(|| Box::new([0; 512]))
    }

    fn value(&mut self, word: &str) -> u64 {
        if let Some(name) = word.strip_prefix('&') {
            return self.variable(name).as_ptr() as u64;
        }
        if let Some(hex) = word.strip_prefix("0x") {
            return u64::from_str_radix(hex, 16).expect("a hexadecimal number");
        }
        if let Ok(number) = word.parse::<i64>() {
            return number.cast_unsigned();
        }
        let (name, offset) = word.split_once('+').unwrap_or((word, "0"));
        let variable = self.variable(name);
        let value = u64::from_le_bytes(std::array::from_fn(|at| variable[at]));
        value + offset.parse::<u64>().expect("an offset")
    }
}

/// A kernel that traps.
extern "C" fn trap(_memory: *mut c_void, _argument: *mut c_void) -> c_int {
    1
}

/// Serves commands. The variable `trap` has the address of a kernel that traps.
#[test]
#[ignore = "a process of the other tests"]
fn agent() {
    let path = std::env::var_os(ROLE).expect("a test has started this process");
    // SAFETY: loading runs no code that could be unsound; the library stays loaded.
    let library = unsafe { Library::open(Some(PathBuf::from(path)), RTLD_NOW | RTLD_LOCAL) };
    let mut agent = Agent { library: library.expect("it can be loaded"), variables: HashMap::new() };
    let kernel: extern "C" fn(*mut c_void, *mut c_void) -> c_int = trap;
    agent.variable("trap")[..8].copy_from_slice(&(kernel as usize).to_le_bytes());
    while let Some(line) = request() {
        answer(agent.obey(&line));
    }
    // Not by returning: streams may never complete.
    std::process::exit(0);
}
