use super::*;

#[test]
fn counters_are_formatted_for_prometheus() {
    let metrics = Metrics::default();
    metrics.leases.add(3);
    metrics.leases.subtract(1);
    let text = metrics.read().to_prometheus();
    let expected =
        "# HELP device_ipc_leases Leases held.\n# TYPE device_ipc_leases gauge\ndevice_ipc_leases 2\n";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("# TYPE device_ipc_opens_total counter\ndevice_ipc_opens_total 0\n"), "{text}");
}
