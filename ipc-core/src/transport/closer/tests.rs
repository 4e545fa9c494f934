use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::*;

const DEADLINE: Duration = Duration::from_secs(10);

struct Slow(Receiver<()>);

impl Drop for Slow {
    fn drop(&mut self) {
        let _ = self.0.recv_timeout(DEADLINE);
    }
}

struct Reports(std::sync::mpsc::Sender<()>);

impl Drop for Reports {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

#[test]
fn slow_close_delays_neither_the_caller_nor_other_closes() {
    let (finish, slow) = channel();
    close_elsewhere(Slow(slow));
    let (closed, is_closed) = channel();
    close_elsewhere(Reports(closed));
    is_closed.recv_timeout(DEADLINE).unwrap();
    finish.send(()).unwrap();
}
