//! The model of an inbox and a socket, under every order in which two ends can run: messages come in their order, each once, and
//! nobody sleeps over one that is there.

use std::sync::atomic::Ordering;

use loom::sync::atomic::AtomicU64;
use loom::sync::{Arc, Condvar, Mutex};

use super::inbox::{Inbox, Put, SharedWord};

impl SharedWord for AtomicU64 {
    fn load(&self, ordering: Ordering) -> u64 {
        self.load(ordering)
    }

    fn store(&self, value: u64, ordering: Ordering) {
        self.store(value, ordering);
    }

    fn fence() {
        loom::sync::atomic::fence(Ordering::SeqCst);
    }
}

/// What goes by the socket.
enum Packet {
    Message(u64),
    Look,
}

/// What the two ends share. The inbox has room for one word.
struct Model {
    taken: AtomicU64,
    awake: AtomicU64,
    words: Vec<AtomicU64>,
    socket: Mutex<Vec<Packet>>,
    arrived: Condvar,
}

impl Model {
    fn new() -> Arc<Self> {
        let model = Self {
            taken: AtomicU64::new(0),
            awake: AtomicU64::new(1),
            words: (0..9).map(|_| AtomicU64::new(0)).collect(),
            socket: Mutex::new(Vec::new()),
            arrived: Condvar::new(),
        };
        Arc::new(model)
    }

    fn inbox(&self) -> Inbox<'_, AtomicU64> {
        Inbox { taken: &self.taken, awake: &self.awake, words: &self.words }
    }

    /// As `Connection::send`.
    fn send(&self, number: u64, last: &mut u64) {
        let put = self.inbox().put((*last, number), &[number as u8]);
        if put != Put::Refused {
            *last = number;
        }
        let packet = match put {
            Put::Refused => Packet::Message(number),
            Put::Unseen => Packet::Look,
            Put::Done => return,
        };
        self.socket.lock().unwrap().push(packet);
        self.arrived.notify_one();
    }

    /// As `Connection::receive`: out of the inbox, or by a packet behind which the inbox is looked at once more.
    fn receive(&self, next: u64, early: &mut Option<Packet>) {
        loop {
            let inbox = self.inbox();
            if inbox.has(next) {
                assert_eq!(inbox.take(next), Some(vec![next as u8]));
                return;
            }
            let packet =
                early.take().or_else(|| if inbox.fall_asleep(next) { Some(self.sleep()) } else { None });
            let Some(packet) = packet else { continue };
            inbox.wake_up();
            if inbox.has(next) {
                *early = Some(packet);
                continue;
            }
            match packet {
                Packet::Message(number) => return assert_eq!(number, next, "in its order"),
                Packet::Look => {}
            }
        }
    }

    fn sleep(&self) -> Packet {
        let mut socket = self.socket.lock().unwrap();
        while socket.is_empty() {
            socket = self.arrived.wait(socket).unwrap();
        }
        socket.remove(0)
    }
}

#[test]
fn messages_come_in_their_order_and_nobody_sleeps_over_one() {
    loom::model(|| {
        let model = Model::new();
        let sender = loom::thread::spawn({
            let model = Arc::clone(&model);
            move || {
                let mut last = 0;
                (1..=3).for_each(|number| model.send(number, &mut last));
            }
        });
        let mut early = None;
        (1..=3).for_each(|number| model.receive(number, &mut early));
        sender.join().unwrap();
    });
}
