//! The program `device-ipc` with the backend acme.

use acme as _;

fn main() -> std::process::ExitCode {
    device_ipc_cli::main()
}
