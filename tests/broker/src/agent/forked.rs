//! What becomes of the library in a forked child.

use std::os::fd::OwnedFd;
use std::time::Duration;

use device_ipc_core::{Error, Result};

use super::{Agent, variant};

impl Agent {
    /// Forks. The child tries everything with the guards of its parent, says what came of it as events, drops all of
    /// them, and stays; the answer is its process id.
    pub(super) fn fork(&mut self) -> Result<String> {
        let (done, tell_done): (OwnedFd, OwnedFd) = rustix::pipe::pipe().expect("a pipe");
        // SAFETY: the agent's own thread holds no lock here, and the child calls nothing that takes one which another
        // thread may hold: that calls into the library return before they do is what is tested.
        match unsafe { libc::fork() } {
            0 => {
                drop(done);
                self.try_everything_in_the_child();
                write_line("event child done");
                let _ = rustix::io::write(&tell_done, &[1]);
                loop {
                    // SAFETY: a plain system call.
                    unsafe { libc::pause() };
                }
            }
            pid => {
                drop(tell_done);
                assert!(pid > 0, "{}", std::io::Error::last_os_error());
                assert_eq!(rustix::io::read(&done, &mut [0]), Ok(1), "the child gets to its end");
                Ok(pid.to_string())
            }
        }
    }

    fn try_everything_in_the_child(&mut self) {
        let time = Duration::from_secs(5);
        let descriptor = self
            .exports
            .values()
            .map(|export| export.descriptor().clone())
            .chain(self.mappings.values().map(|mapping| mapping.descriptor().clone()))
            .next();
        if let Some(descriptor) = descriptor {
            told("open", self.ipc().open(&descriptor).timeout(time).at_home().map(drop));
        }
        told("allocate", self.ipc().allocate(0, 4096).map(drop));
        told("shutdown", device_ipc_core::shutdown(time));
        told("close-unused", device_ipc_core::close_unused(time));
        self.try_channels_in_the_child(told);
        self.try_rings_in_the_child(told);
        told("cache", device_ipc_core::set_cache_limits(device_ipc_core::CacheLimits::NONE));
        for (_, export) in std::mem::take(&mut self.exports) {
            told("holders", if export.holders().iter().len() == 0 { Err(Error::Forked) } else { Ok(()) });
            told("wait-released", export.wait_released(time));
            told("close", export.close(time));
        }
        let stream = self.stream.take();
        for (index, (_, mapping)) in std::mem::take(&mut self.mappings).into_iter().enumerate() {
            if let Some(stream) = &stream {
                told("view", mapping.view::<f32, _>(stream).map(drop));
                if index == 0 {
                    told("release", mapping.release(stream).map_err(Error::from));
                }
            }
        }
        drop(stream);
        self.buffers.clear();
        self.ipc = None;
        self.backend = None;
        self.mock = None;
    }
}

fn told(what: &str, result: Result<()>) {
    let how = result.map_or_else(|error| variant(&error), |()| "went well".to_owned());
    write_line(&format!("event child {what} {how}"));
}

/// Past the standard library's buffer and lock.
fn write_line(line: &str) {
    let _ = rustix::io::write(rustix::stdio::stdout(), format!("{line}\n").as_bytes());
}
