use super::*;
use crate::model::address::DevicePtr;
use crate::model::device::DeviceOrdinal;

#[test]
fn seeds_are_conversations_as_specified() {
    // The fuzz target has a backend, so replies have handles.
    let range = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(4096), 4096);
    let shared = Shared {
        ready: None,
        allocations: [].into(),
        regions: [].into(),
        remote: None,
        owner: None,
        keeps: false,
    };
    let exporter = Exporter { range, shared, buffers: Mutex::default() };
    for (name, seed) in super::super::request_seeds() {
        eprintln!("{name}");
        exporter.serve(&seed);
    }
}
