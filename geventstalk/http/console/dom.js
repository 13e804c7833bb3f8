// The view layer in one place: Preact, its hooks, and htm, which writes elements as tagged templates. Values in a template
// are text or properties, never markup.
import htm from "./vendor/htm.js";
import { Component, h, render } from "./vendor/preact.js";

export const html = htm.bind(h);

/** Shows `otherwise` where its content cannot be drawn; the browser's own log gets the error. */
export class Careful extends Component {
  constructor() {
    super();
    this.state = { error: null };
  }

  componentDidCatch(error) {
    reportError(error);
    this.setState({ error });
  }

  render() {
    return this.state.error ? this.props.otherwise(this.state.error) : this.props.children;
  }
}

export { render };
export {
  useCallback,
  useEffect,
  useLayoutEffect,
  useMemo,
  useRef,
  useState,
} from "./vendor/hooks.js";
