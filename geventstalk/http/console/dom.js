// The view layer in one place: Preact, its hooks, and htm, which writes elements as tagged templates. Everything that is
// put into a template is text or a property, never markup.
import htm from "./vendor/htm.js";
import { Component, h, render } from "./vendor/preact.js";

export const html = htm.bind(h);

/** Shows `otherwise` where what it holds cannot be drawn; the browser's own log gets the error. */
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
