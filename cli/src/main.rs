//! The program `device-ipc` with the backends that the features of this package select.

fn main() -> std::process::ExitCode {
    device_ipc_cli::main()
}
