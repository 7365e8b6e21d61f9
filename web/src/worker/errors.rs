//! Errors as the page gets them: code, words, and fields by name.

use ebbtide::Error;
use serde_json::{Map, Value, json};

use crate::protocol::ErrorInfo;

/// An error for the page.
pub fn info(error: &Error) -> ErrorInfo {
    let fields: Map<String, Value> = match fields(error) {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    ErrorInfo { code: error.code().into(), message: error.to_string(), fields }
}

fn fields(error: &Error) -> Value {
    match error {
        Error::Io { file, reason } | Error::SourceChanged { file, reason } => json!({ "file": file, "reason": reason }),
        Error::Format { file, tensor, reason } => json!({ "file": file, "tensor": tensor, "reason": reason }),
        Error::NotFound { what, name, hint } => json!({ "what": what, "name": name, "hint": hint }),
        Error::Shape { op, reason } => json!({ "op": op, "reason": reason }),
        Error::Invalid { what, reason } | Error::Gpu { what, reason } => json!({ "what": what, "reason": reason }),
        Error::BudgetBelowFloor { asked, floor, set_by } => {
            json!({ "asked": asked.0, "floor": floor.0, "set_by": set_by })
        }
        Error::Limit { what, need, have } => json!({ "what": what, "need": need, "have": have }),
        Error::NoAdapter { reason } | Error::DeviceLost { reason } => json!({ "reason": reason }),
        Error::OutOfMemory { what, size, in_use } => json!({ "what": what, "size": size.0, "in_use": in_use.0 }),
        Error::Plan { action, reason } => json!({ "action": action, "reason": reason }),
        Error::SourceReleased { weight } => json!({ "weight": weight }),
        Error::Hook { hook, reason } => json!({ "hook": hook, "reason": reason }),
        _ => Value::Null,
    }
}
