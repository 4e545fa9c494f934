use super::*;
use crate::backend::Rank;

fn absent() -> Result<Arc<dyn DeviceIpc>, Unavailable> {
    Err(Unavailable::NoDevice { detail: "nothing is plugged in".into() })
}

#[test]
fn unknown_name_error_lists_known_backends() {
    let backends = Backends::none().with(Registration::new("acme", Rank::THIRD_PARTY, absent));
    let error = backends.named("acne").unwrap_err().to_string();
    assert!(error.contains("\"acne\"") && error.contains("known backends: acme"), "{error}");
}

#[test]
fn auto_without_devices_reports_every_reason() {
    let backends = Backends::none()
        .with(Registration::new("sim", Rank::SIMULATED, absent))
        .with(Registration::new("acme", Rank::THIRD_PARTY, absent));
    let error = backends.auto().unwrap_err().to_string();
    assert!(error.contains("acme: no device: nothing is plugged in"), "{error}");
    assert!(error.contains("DEVICE_IPC_BACKEND=sim"), "{error}");
    let error = Backends::none().auto().unwrap_err().to_string();
    assert!(error.contains("none is compiled in"), "{error}");
}

#[test]
fn backends_are_ordered_by_rank_and_unique_by_name() {
    let backends = Backends::none()
        .with(Registration::new("zeta", Rank(1), absent))
        .with(Registration::new("acme", Rank(7), absent))
        .with(Registration::new("zeta", Rank(9), absent));
    let names: Vec<_> = backends.available().iter().map(|one| one.name).collect();
    assert_eq!(names, ["zeta", "acme"]);
}
