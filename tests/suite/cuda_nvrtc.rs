//! The example `cuda_nvrtc` in two processes, where there are a GPU and NVRTC.

#[path = "../../examples/cuda_nvrtc.rs"]
mod example;

use std::path::Path;

use super::roles::{argument, no_cuda, role as this_role, start};

#[test]
fn nvrtc_kernel_changes_memory_of_another_process() {
    if let Some(reason) = no_cuda().or_else(|| example::check_nvrtc().err().map(|error| error.to_string())) {
        eprintln!("skipped: {reason}");
        return;
    }
    let path = std::env::temp_dir().join(format!("device-ipc-nvrtc-{}", std::process::id()));
    let arguments = [("PATH", path.to_str().expect("a plain path"))];
    let share = start(module_path!(), "share", &arguments);
    share.line(|line| line.contains("published").then_some(()));
    start(module_path!(), "add", &arguments).finish();
    share.finish();
    std::fs::remove_file(&path).expect("the file is ours");
}

#[test]
#[ignore = "a role of the test above"]
fn role() {
    let path = argument("PATH");
    let path = Path::new(&path);
    if this_role() == "share" {
        let published = || println!("published");
        let bytes = example::share(path, published).expect("the exporter works");
        assert_eq!(bytes, [4; example::COUNT]);
    } else {
        example::add(path).expect("the importer works");
    }
}
